"""`rl-export`: a trained adapter, or the model merged with it, for use elsewhere.

Guarantee: What is exported is what was evaluated under that version. Nothing but its command line enters.
"""
