"""Everything that knows vLLM.

Guarantee: Outside this room only the protocols in `producer.interfaces` are used. Only the daemon may enter; it imports vLLM
when it is started, not before.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; only the CPU build reads it, its default is half the memory
