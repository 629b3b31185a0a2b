"""The wiring of a trainer, one function per part. No logic of its own.

Guarantee: Parts are built in the order in which they need each other. Only the daemon may enter.
"""
