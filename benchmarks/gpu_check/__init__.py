"""`make gpu-check`: what Slipstream does on one NVIDIA GPU, in 5, 15 or 30 minutes.

Guarantee: each part is a process of its own with a time limit. What fails, is too slow or misses a package is a result, and the
next part runs; what was found until then is kept. `--gpu cpu` runs the smallest sizes of what needs no GPU.
"""
