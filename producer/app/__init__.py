"""The `rl-producer` command and the life of its process: how the parts are built, joined and watched.

Guarantee: what is started is ended in the reverse order, and an exception in any part ends the process with its exit code. No
other room imports this one.
"""
