"""What a run leaves on the disk to go on from: checkpoints, adapters, the facts that identify it.

Guarantee: A checkpoint is found whole or not at all. Training, tools and the wiring may enter.
"""
