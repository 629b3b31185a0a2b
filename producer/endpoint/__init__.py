"""The producer's OpenAI endpoint.

Guarantee: a client sees OpenAI's protocol and the policy version of each answer, and no client holds up training. The engine's
server and the daemon may enter.
"""
