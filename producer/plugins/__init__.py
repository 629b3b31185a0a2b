"""Rooms that speak another project's protocol, each found by an entry point of its group.

Guarantee: nothing outside this room imports one of them by name; a package of somebody else can add another beside them.
"""
