"""The I/O thread: sessions of producers, leases given, groups received, the end of a run.

Guarantee: Nothing that a producer sends ends the thread, and nothing is acknowledged before the journal has it. The wiring,
evaluations and reporting may enter.
"""
