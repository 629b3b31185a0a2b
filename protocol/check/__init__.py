"""`--check`: what can be told of a configuration without a library, before anything starts.

Guarantee: all mistakes are in one error, each with its line, within a second; nothing of the user's is run. Everyone above may
enter; it imports no heavy library.
"""
