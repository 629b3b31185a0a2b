"""Code that nobody trusts, run where it can do no harm.

Guarantee: what runs here sees no network, no file but its interpreter's and its own, and no other process; it gets the time,
memory, processes and disk that its limits say; and when `run` returns, nothing of it is left. Where the machine cannot hold
code so, `check` refuses, and nothing runs.
"""
