"""Policies that producers hand on: on one host through a cache in memory, to other hosts through relays that the trainer names.

Guarantee: whatever they hand on has its sha256, and where they fail the trainer is asked.
"""
