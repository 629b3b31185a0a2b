"""The OpenAI endpoint of the producer, for clients and for agents outside.

Guarantee: a client sees OpenAI's protocol and the policy version of each answer, and no client holds up training. An episode of
an agent has exactly the tokens that the engine sampled for it.
"""
