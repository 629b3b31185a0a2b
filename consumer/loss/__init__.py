"""The mathematics of a step: forward pass, LM head, importance, KL, loss.

Guarantee: Every formula names its source and agrees in float64 with a second implementation in the tests. The trainer and the
reports may enter; it knows no socket, journal or file.
"""
