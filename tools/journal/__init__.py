"""`rl-journal`: looks at a journal, checks it, exports it, backs it up.

Guarantee: A journal is read while its trainer writes it, and of every release. Nothing but its command line enters.
"""
