"""`rl-producer` with a scripted engine that is on the GPU of `tests.integration.one_gpu` while it is awake. All else is real."""

import asyncio
import os
import random
from typing import Any

from producer.app import cli
from tests.integration.one_gpu import OneGpu
from tests.scripted_engine import Pace, ScriptedEngine, put_in_place


class Engine(ScriptedEngine):
    """Fails where it is asked for something while it sleeps."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, Pace(fast_s=0.02, slow_s=0.3, share_slow=0.2), random.Random(), lambda point: None)
        self._gpu = OneGpu("producer")
        self._gpu.come(wait=True)
        self._inside = 0
        self.weights.load = self._load  # type: ignore[method-assign]

    async def generate(self, *request: Any) -> Any:
        self._inside += 1
        try:
            assert self._gpu.is_here, "it sleeps"
            return await super().generate(*request)
        finally:
            self._inside -= 1

    async def _load(self, adapter: Any) -> None:
        assert self._gpu.is_here, "it sleeps"

    async def sleep(self) -> None:
        assert not self._inside
        if os.environ.get("NEVER_SLEEPS"):
            await asyncio.Event().wait()
        self._gpu.go()

    async def wake(self) -> None:
        self._gpu.come()


if __name__ == "__main__":
    put_in_place(lambda config, num_gpus: Engine(config))
    cli.main()
