"""How a policy leaves the trainer: snapshot, probe, publisher, the store that producers download from.

Guarantee: A version is published after the journal knows it, whole, and with what proves that it arrived. Training and intake
may enter.
"""
