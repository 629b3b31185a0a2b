"""`rl-keys`: makes the CURVE keys of a run.

Guarantee: A key file can be read by its owner alone. Nothing but its command line enters.
"""
