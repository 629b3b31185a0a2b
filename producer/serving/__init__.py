"""The producer's OpenAI endpoint.

Guarantee: A client sees OpenAI's protocol and a policy version per answer; no client holds up training. The engine's server
and the daemon may enter.
"""
