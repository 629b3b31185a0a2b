"""The process of the trainer: its command, its life, its wiring, and the run from the first step to the final adapter.

Guarantee: parts are built in the order in which they need each other, each in one place (`wiring`). A run ends with every step
taken or with a checkpoint of the last one. No other room enters.
"""
