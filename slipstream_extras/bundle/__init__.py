"""The parts of a run that a producer gets from its trainer: the configuration and the run's own Python files.

Guarantee: Nothing in a bundle is a secret that the configuration holds or names a place on the trainer's host, and nothing
of it is ever written outside the folder that it is unpacked into. The trainer enters through `packing`, a producer through
`bundle` and `requirements`.
"""
