"""Policy versions on a producer: download, verification, the registry of what is loaded.

Guarantee: A version that serves is the one that was published, bit for bit, and is unloaded only when nothing uses it. Rollouts,
serving and the daemon may enter.
"""
