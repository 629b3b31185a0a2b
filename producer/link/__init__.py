"""The producer's connection to the trainer: session, downloads, the outbox of what is not acknowledged.

Guarantee: A group is sent until the trainer says that it has it. Only the daemon may enter.
"""
