"""The producer: a vLLM engine that turns leases into scored rollout groups.

Guarantee: a producer owns no state that outlives it, and only `producer.engine` imports vLLM.
"""
