"""Tests of a program that cannot be told to pass: they run in another sandbox than the program does.

Guarantee: nothing of a test enters the program's sandbox but the arguments of calls; nothing comes back but data and references
to the program's own objects; whether a test passes is decided where the program can neither look nor write.
"""
