"""Prompts: datasets, their rows, filters, mixtures, transforms of users, the tokenizer.

Guarantee: a prompt's number means the same row in every process of a run; a bad row is an error with its place and fails
alone. No user's function runs while the run trains. All rooms above may enter.
"""
