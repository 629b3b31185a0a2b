"""The facts of a GPU that need no CUDA: its memory, the part that a run takes, and the other daemons on it.

Guarantee: both daemons compute the same numbers from the same file, without a word to each other and without torch. A machine
without a GPU or NVML is no error here. The commands, both daemons and the metrics may enter.
"""
