"""Environments that speak another project's protocol.

Guarantee: each is found by its entry point, so another package can add one in the same way (docs/plugins.md).
"""
