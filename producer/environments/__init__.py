"""Environments and agents: the pool of environments, agent programs of plugins, and leases that agents fulfil.

Guarantee: an episode's tokens are those that the engine sampled; whatever an environment does, the producer goes on. Rollouts
and serving may enter.
"""
