"""Code that nobody trusts runs here, where it can do no harm.

Guarantee: a program sees no network, no files but its interpreter's and its own, and no other process. It gets the time, memory,
processes and disk that its limits say, and when `run` returns, nothing of it is left. Where the machine cannot isolate a program
so, `check` refuses, and nothing runs. The reward `code` and its judge may enter.
"""
