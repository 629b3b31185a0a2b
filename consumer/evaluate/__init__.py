"""Evaluations of a run: which versions are due, their leases, results, when to stop.

Guarantee: Every version that is due is evaluated once, on the same prompts, also across restarts, and never holds training
up. Training, reporting and the wiring may enter.
"""
