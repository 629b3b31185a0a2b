"""The paths of a GPU on a machine without one.

A stand-in for a GPU (`tests.gpu.stand_in`) has the host's memory and the CPU's kernels, so the real trainer runs on `cuda:0`. It
cannot be taken out of a process again: `conftest.py` runs every test in a fork of a process that has it.
"""
