"""A producer that was given an address instead of a configuration: it gets the run's bundle from the trainer and applies it.

Guarantee: nothing that comes over an address without keys is run, unless it is a socket file of this user; nothing is run
before its digest was checked. The command enters through `joined`.
"""
