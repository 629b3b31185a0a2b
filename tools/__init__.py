"""What people run beside the daemons.

Guarantee: A tool reads what a run left, or asks a daemon as any client would; none changes a run that is going on. Nothing
imports a tool but the tool itself.
"""
