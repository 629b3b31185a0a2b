"""From accepted groups to the batch of a step: cutting, replay, watching for signal.

Guarantee: A group is in one batch, and in no second one unless it is replayed on purpose. The buffer and the trainer's
training loop may enter.
"""
