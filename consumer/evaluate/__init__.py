"""Evaluations of a run: the versions that are due, their leases, results, and the reason to stop.

Guarantee: every version that is due is evaluated once, on the same prompts, also across restarts, and never holds training up.
The app and the report may enter.
"""
