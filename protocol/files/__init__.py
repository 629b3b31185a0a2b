"""Files that others rely on: staged writes, rotated lines, scratch folders, shared memory.

Guarantee: Whoever reads a file finds it whole, whenever the writer or the machine stopped. Everyone may enter; it knows
nothing else of Slipstream but its errors.
"""
