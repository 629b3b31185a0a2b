"""What `campaigns.chaos.zygote` imports and runs for `rl-producer`."""

import importlib
from typing import Any

from tests.integration import warm
from tests.integration.forked_cores import forked_cores

_USED = (
    "producer.app.daemon",
    "producer.engine.engine",
    "vllm.v1.engine.core_client",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen2",
)
"""The modules that a producer and its engine core import."""


def preload() -> None:
    for name in _USED:
        importlib.import_module(name)
    with forked_cores():  # what that prepares is there in each fork
        pass


def main(request: dict[str, Any]) -> int:
    if request["spawns"]:
        return warm.run(request)
    with forked_cores():
        return warm.run(request)
