"""The plugin `atropos`: the rollout server that environments of Atropos ask and post to.

Guarantee: every trained token was sampled by this engine behind exactly the tokens that were posted, and is trained once.
"""
