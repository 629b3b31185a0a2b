"""The link to producers: the I/O thread, sessions, leases given, groups received, policies published, turns on a shared GPU.

Guarantee: nothing that a producer sends ends the thread, and no group is acknowledged before the journal has it. A version is
published after the journal knows it, whole, and with the proof of its arrival. All rooms above may enter.
"""
