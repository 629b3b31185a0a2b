"""The content of the pages of `slipstream view` as plain values: groups, coloured spans of text, curves.

Guarantee: pure but for the readers they are given; every value of a request is checked before it is used. The server may enter.
"""
