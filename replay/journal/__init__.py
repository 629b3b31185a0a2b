"""The journal: what was accepted, on the disk before it is acknowledged.

Guarantee: What was acknowledged is found again after any crash; journals of every release can be read. The buffer writes and
recovers; the tools read through `reader`.
"""
