"""Plugins that come with Slipstream and speak another project's protocol. They are found by their entry points.

Guarantee: no other room imports a plugin by name, so another package can add one in the same way (docs/plugins.md).
"""
