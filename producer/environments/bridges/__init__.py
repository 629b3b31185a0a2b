"""Agent programs that play environments of other libraries through a producer's endpoint.

Guarantee: each runs in a Python of its own, where nothing of Slipstream's dependencies has to be installed: these modules import
the standard library, one another and the library that they play for.
"""
