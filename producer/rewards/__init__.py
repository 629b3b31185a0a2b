"""Rewards: the pool that scores groups, its processes and HTTP services, and reasoning that rewards do not see.

Guarantee: whatever a reward does, its group gets a score or a reason, within the time it was given. Rollouts, environments
and `slipstream reward` may enter.
"""
