"""Tests of a program, which run in another sandbox than the program does, so that it cannot make them pass.

Guarantee: only arguments of calls enter the program's sandbox, and only data and references to the program's own objects come
back. Whether a test passes is decided where the program can neither read nor write. The reward `code` may enter.
"""
