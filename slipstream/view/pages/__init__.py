"""What the pages of `slipstream view` show, as plain values: which groups, which spans of text in which colour, which curves.

Guarantee: pure but for the readers they are given; every value of a request is checked before it is used. The server may enter.
"""
