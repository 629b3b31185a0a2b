"""The configuration: one module per section, the file that is read, and the rules across sections.

Guarantee: What passes is complete and consistent; what does not is refused with key, value and fix before anything is
started. Everyone above may read it; it imports no heavy library.
"""
