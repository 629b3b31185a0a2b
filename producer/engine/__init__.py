"""The engine of the producer, which is vLLM in its own process.

Guarantee: the other rooms use the protocols in `producer.engine_contract` alone. Only `producer.app` may enter, and imports vLLM
when it is started, not before. Differences between releases of vLLM stay in here.
"""
