"""The web server of `slipstream view`.

Guarantee: it listens on loopback, answers GET with the right token from pages of its own only, and forbids browsers to run or
load anything that is not in this package. Only the command line enters.
"""
