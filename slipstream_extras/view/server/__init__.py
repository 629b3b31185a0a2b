"""The web server of `slipstream view`.

Guarantee: it listens on loopback, and answers GET with the right token from pages of its own only. Browsers may run and load
nothing from outside of this package. Only the command line enters.
"""
