"""Scores: the pool of reward functions, their processes, services over HTTP, thinking that is cut off.

Guarantee: Whatever a reward does, its group gets a score or a reason, within the time it was given. Rollouts, environments
and `rl-reward` may enter.
"""
