"""The engine of the producer, which is vLLM in its own process.

Guarantee: the other rooms use the protocols in `producer.engine_contract` alone. Only `producer.app` may enter, and imports vLLM
when it is started, not before. Differences between releases of vLLM stay in here.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# GiB. Only the CPU build reads it; its default is most of the memory.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
