"""`rl-producer` with a stand-in for vLLM that answers as slowly as told, and a list of what arrived.

Run as `python -m tests.faults.stand_in_producer` with the arguments of `rl-producer`. Everything around the engine is real.
The environment names two files: `STAND_IN_PACE` holds the seconds that a group takes and may change meanwhile; every lease
and every acknowledgement is in `STAND_IN_NEWS` as soon as it has arrived, one JSON list of time, lease and outcome a line
(`leased` for a lease).
"""

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from producer.app import cli
from producer.app import wiring as assembly
from producer.engine_contract import Completion
from protocol.channel.channel import BadFrame
from protocol.channel.client import ZmqClient
from protocol.wire.messages import Ack, Lease, Sampling, TrainerMessage
from tests.scripted_engine import EngineWithoutWeights, digests, put_in_place


class Engine(EngineWithoutWeights):
    max_num_seqs = 16

    def __init__(self, config: Any, num_gpus: int) -> None:
        super().__init__(config, **digests(config))
        self._pace = Path(os.environ["STAND_IN_PACE"])

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Any, cut: asyncio.Event
    ) -> list[Completion]:
        await asyncio.sleep(float(self._pace.read_text()))
        return [self._completion(sampling, adapter.version) for _ in range(sampling.num_generations)]

    def _completion(self, sampling: Sampling, version: int) -> Completion:
        length = random.randint(sampling.max_completion_length // 2, sampling.max_completion_length)
        tokens = [random.randint(3, 40) for _ in range(length)]
        return Completion(tokens, [-3.5] * length, length == sampling.max_completion_length, [version] * length)


class ListingClient(ZmqClient):
    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]:
        messages = super().poll(timeout_s)
        news = [(message.lease_id, "leased") for message in messages if isinstance(message, Lease)]
        news += [(message.lease_id, message.outcome) for message in messages if isinstance(message, Ack)]
        if news:
            with Path(os.environ["STAND_IN_NEWS"]).open("a") as file:
                file.writelines(json.dumps([time.time(), *one]) + "\n" for one in news)
        return messages


if __name__ == "__main__":
    put_in_place(Engine)
    assembly.ZmqClient = ListingClient  # type: ignore[misc]
    cli.main()
