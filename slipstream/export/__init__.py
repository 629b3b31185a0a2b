"""`rl-export`: merges a trained adapter into its base model, for use elsewhere.

Guarantee: What is exported computes what was trained. Nothing but its command line enters.
"""
