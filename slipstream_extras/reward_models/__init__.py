"""Rewards that a model on this host gives: its logit, the values of steps, or features that match.

Guarantee: each runs in a process of its own, under its own limit of time.
"""
