"""`rl-producer` with a stand-in for vLLM that refuses versions for good, from the first number of the file REFUSES to its second.

Run as `python -m tests.integration.refusing_producer` with the arguments of `rl-producer`. Without the file nothing is refused.
"""

import os
import random
from pathlib import Path
from typing import Any

from producer.app import cli
from producer.engine_contract import Adapter, AdapterRefusedError
from tests.scripted_engine import NoWeights, Pace, ScriptedEngine, put_in_place


class Refusing(NoWeights):
    async def load(self, adapter: Adapter) -> None:
        first, last = refused()
        if first <= adapter.version <= last:
            raise AdapterRefusedError("rank 512 is too large")


def refused() -> tuple[int, int]:
    file = Path(os.environ["REFUSES"])
    if not file.exists():
        return 0, -1
    first, last = map(int, file.read_text().split())
    return first, last


def engine(config: Any, num_gpus: int) -> ScriptedEngine:
    made = ScriptedEngine(config, Pace(0.01, 0.05), random.Random(1), lambda point: None)
    made.weights = Refusing()
    return made


if __name__ == "__main__":
    put_in_place(engine)
    cli.main()
