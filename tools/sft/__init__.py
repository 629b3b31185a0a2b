"""`rl-sft`: trains an adapter by imitation, for a run to begin from.

Guarantee: Its result is an adapter that `lora.init_from` takes. Nothing but its command line enters.
"""
