"""Turns leases into groups: generation, admission, groups in flight, conversations, episodes.

Guarantee: Every lease ends in exactly one answer, a group or a reason why there is none. Only the daemon may enter.
"""
