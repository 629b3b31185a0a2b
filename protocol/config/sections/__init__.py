"""The sections of the configuration, one module each.

Guarantee: a section that passes is complete and consistent in itself; what concerns two sections is in
`protocol.config.consistency`. Everyone may read them.
"""
