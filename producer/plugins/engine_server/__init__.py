"""A vLLM server that is already running, as the producer's engine: everything that knows its HTTP API.

Guarantee: neither vLLM nor torch is imported here. What a server says is checked before it is used, and no more is believed than
what it proves; a server that is gone, fails or lies costs time and nothing else. Only `producer.app.wiring` may enter.
"""
