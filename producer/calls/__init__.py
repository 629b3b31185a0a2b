"""Requests of clients in the engine: what they ask for, what was sampled for them, and what of it may be trained.

Guarantee: every sampled token is kept with its log-prob and its policy version until somebody scores it or it is dropped.
Serving, environments and rollouts may enter.
"""
