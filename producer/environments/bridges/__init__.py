"""Agent programs that play environments of other libraries through a producer's endpoint.

Guarantee: each runs in a Python of its own, where none of Slipstream's dependencies has to be installed. These modules import the
standard library, each other and the library whose environments they play. Only `producer.environments.agent_program` starts them.
"""
