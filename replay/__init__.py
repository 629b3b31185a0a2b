"""The memory of the trainer: the prompt ledger, the staleness budget, the replay table and their composition.

Guarantee: nothing in this package imports torch, vLLM, TRL or ZeroMQ, so all of it is tested as plain data structures.
"""
