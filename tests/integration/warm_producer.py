"""What `tests.chaos.zygote` imports and runs for `rl-producer`."""

import importlib

from tests.integration import warm

_USED = ("producer.daemon", "producer.engine", "vllm.v1.engine.core_client", "transformers.models.qwen2")
"""What a producer imports before its engine core starts."""

main = warm.run


def preload() -> None:
    for name in _USED:
        importlib.import_module(name)
