"""A vLLM server that is already running, as the producer's engine: everything that knows its HTTP API.

Guarantee: neither vLLM nor torch is imported here. Every answer of a server is checked before it is used, and a server has to
prove what it claims; a server that is gone, fails or lies costs time and nothing else. It is found by its entry points.
"""
