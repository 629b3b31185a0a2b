"""The reward `code` and its judge: tests of a program run in another sandbox than the program, so that it cannot make them pass.

Guarantee: only arguments of calls enter the program's sandbox, and only data and references to the program's own objects come
back. The verdict is reached where the program can neither read nor write.
"""
