"""`rl-sft`: trains an adapter on given completions, from which a run begins.

Guarantee: Its result is an adapter that `lora.init_from` takes. Nothing but its command line enters.
"""
