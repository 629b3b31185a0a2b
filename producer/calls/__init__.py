"""Requests of clients in the engine: what was asked, what was sampled, what may be trained of it.

Guarantee: Every sampled token is kept with its log-prob and its policy version until somebody scores it or it is dropped.
Serving, environments and rollouts may enter.
"""
