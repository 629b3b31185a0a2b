"""The configuration: its sections, the file that is read, and the rules across sections.

Guarantee: A configuration that passes is complete and consistent; any other is refused with key, value and fix before
anything is started. Everyone above may read it; it imports no heavy library.
"""
