"""`rl-environment`: writes the rows of another library's environment as a dataset.

Guarantee: The environment is read by the code and in the process that the producer uses. Nothing but its command line enters.
"""
