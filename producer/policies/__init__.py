"""Policy versions on a producer: download, verification, the registry of loaded versions.

Guarantee: A version that serves is the published one, bit for bit, and is unloaded only when nothing uses it. Rollouts,
serving and the daemon may enter.
"""
