"""Everything that knows vLLM.

Guarantee: Outside this room only the protocols in `producer.interfaces` are used. Only the daemon may enter; it imports vLLM
when it is started, not before.
"""
