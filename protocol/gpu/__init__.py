"""What the two daemons know of a GPU before CUDA does: its memory, what a run takes of it, and who else is on it.

Guarantee: both daemons compute the same numbers from the same file, without a word to each other and without torch. A machine
without a GPU or NVML is no error here. The commands, both daemons and the metrics may enter.
"""
