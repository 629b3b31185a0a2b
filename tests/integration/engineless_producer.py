"""`rl-producer` with a stand-in for vLLM: everything around the engine is real, and it starts within seconds.

Run as `python -m tests.integration.engineless_producer` with the arguments of `rl-producer`. Every completion is one token.
"""

import sys
from pathlib import Path
from types import ModuleType

from producer import cli
from producer.interfaces import AdapterRefusedError, Completion
from tests.scripted import facts


class Engine:
    max_num_seqs = 8

    def __init__(self, config, num_gpus) -> None:
        self.folder = Path(config.model.path)
        self.facts = facts()

    async def warm_up(self) -> None: ...

    async def generate(self, prompt_ids, sampling, adapter, cut):
        return [Completion([5], [-0.5], False) for _ in range(sampling.num_generations)]

    async def score(self, token_ids, adapter) -> list[float]:
        raise AdapterRefusedError("there are no weights here")

    def load(self):
        return None

    async def load_adapter(self, adapter) -> None: ...

    def adopt_adapter(self, adapter) -> None: ...

    async def unload_adapter(self, adapter) -> None: ...

    def check_alive(self) -> None: ...

    def shutdown(self) -> None: ...


if __name__ == "__main__":
    stand_in = ModuleType("producer.engine.engine")
    stand_in.Engine = Engine  # type: ignore[attr-defined]
    sys.modules["producer.engine.engine"] = stand_in
    sys.exit(cli.main())
