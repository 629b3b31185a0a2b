"""The journal: accepted groups, on the disk before they are acknowledged.

Guarantee: An acknowledged group is found again after any crash. The buffer writes and recovers; the command reads through
`reader`.
"""
