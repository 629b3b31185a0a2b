"""Environments and agents: the pool of environments, programs of other libraries, and Atropos.

Guarantee: an episode's tokens are those that the engine sampled; whatever an environment does, the producer goes on. Rollouts
and serving may enter.
"""
