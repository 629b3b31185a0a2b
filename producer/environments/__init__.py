"""Environments and agents: pools of them, programs of other libraries, Atropos.

Guarantee: An episode's tokens are those that the engine sampled; whatever an environment does, the producer goes on. Rollouts
and serving may enter.
"""
