"""`rl-environment`: plays an environment of a run by hand or by script, without an engine.

Guarantee: The environment is run by the code and in the process that the producer uses. Nothing but its command line enters.
"""
