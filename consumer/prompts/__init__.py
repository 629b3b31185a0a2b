"""Prompts: datasets, their rows, filters, mixtures, transforms of users, the tokenizer.

Guarantee: A prompt's number means the same row in every process of a run; a bad row is an error with its place and fails
alone. Everyone above may enter.
"""
