"""The command `slipstream`, which people run beside the daemons.

Guarantee: A command reads what a run left, or asks a daemon as any client would; none changes a run that is going on. The
rooms do not import each other; `run_reader`, `run_inputs`, `command` and `tables` are what they share.
"""
