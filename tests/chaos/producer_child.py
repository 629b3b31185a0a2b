"""`rl-producer`, watched: the real command around a stand-in for vLLM, with its evidence written down and points to die
at.

Guarantee: every acknowledgement that reaches this process is on the disk before the producer can forget the group. No two
groups have equal tokens, so that digests tell them apart.
"""

import asyncio
import importlib
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from producer.interfaces import AdapterRefusedError, Completion
from protocol.digests import base_model_digest, tokenizer_digest
from tests.chaos.aims import Aim
from tests.chaos.evidence import EvidenceLog, digest_of_message
from tests.scripted import facts

_USED = ("producer.daemon", "producer.cli")
_FAST_S, _SLOW_S, _SHARE_SLOW = 0.03, 0.9, 0.4  # so slow that the trainer waits, and groups stand in


def preload() -> None:
    for name in _USED:
        importlib.import_module(name)
    from transformers import AutoTokenizer

    assert AutoTokenizer


def main(request: dict[str, Any]) -> int:
    log = EvidenceLog(Path(request["evidence"]))
    aim = Aim(*request.get("aim", ()))
    stand_in = ModuleType("producer.engine")
    stand_in.Engine = _engine_class(aim)  # type: ignore[attr-defined]
    sys.modules["producer.engine"] = stand_in
    _watch(log, aim)
    from producer import cli

    log.note("process", argv=request["argv"])
    return cli.main()


def _engine_class(aim: Aim) -> type:
    class Engine:
        max_num_seqs = 8

        def __init__(self, config: Any, num_gpus: int) -> None:
            self.folder = Path(config.model.path)
            self.facts = facts(
                base_model_digest=base_model_digest(self.folder),
                tokenizer_digest=tokenizer_digest(self.folder),
                reward_names=list(config.reward_names),
            )
            self._random = random.Random(os.urandom(16))

        async def warm_up(self) -> None: ...

        async def generate(self, prompt_ids: Any, sampling: Any, adapter: Any, cut: Any) -> list[Completion]:
            aim.reach("generate.begin")
            chance = self._random
            await asyncio.sleep(chance.uniform(0, _SLOW_S if chance.random() < _SHARE_SLOW else _FAST_S))
            aim.reach("generate.half")
            await asyncio.sleep(0)
            longest = sampling.max_completion_length
            lengths = [chance.randint(1, longest) for _ in range(sampling.num_generations)]
            aim.reach("generate.done")
            return [
                Completion(
                    [chance.randrange(3, 40) for _ in range(length)],
                    [-chance.uniform(0.1, 4.0) for _ in range(length)],
                    length == longest,
                )
                for length in lengths
            ]

        async def score(self, token_ids: Any, adapter: Any) -> list[float]:
            raise AdapterRefusedError("there are no weights here")

        def load(self) -> None:
            return None

        async def load_adapter(self, adapter: Any) -> None: ...

        def adopt_adapter(self, adapter: Any) -> None: ...

        async def unload_adapter(self, adapter: Any) -> None: ...

        def check_alive(self) -> None: ...

        def shutdown(self) -> None: ...

    return Engine


def _watch(log: EvidenceLog, aim: Aim) -> None:
    from producer.adapters import AdapterRegistry
    from producer.link import Link
    from protocol.messages import Ack, Group, Hello, Lease, Nack, Welcome
    from protocol.zmq_channel import ZmqClient

    receive = Link._receive

    def watched_receive(link: Any, message: Any) -> bool:
        match message:
            case Ack() | Nack():
                held = link._outbox._answers.get(message.lease_id)
                outcome = message.outcome if isinstance(message, Ack) else message.reason
                digest = digest_of_message(held) if isinstance(held, Group) else None
                log.note(type(message).__name__.lower(), lease_id=message.lease_id, outcome=outcome, digest=digest)
                aim.reach("ack.received")
                result = receive(link, message)
                aim.reach("ack.settled")
                return result
            case Welcome():
                aim.reach("welcome.received")
            case Lease():
                aim.reach("lease.received")
                result = receive(link, message)
                aim.reach("lease.begun")
                return result
        return receive(link, message)

    Link._receive = watched_receive  # type: ignore[method-assign]

    send = ZmqClient.send

    def watched_send(channel: Any, message: Any) -> bool:
        name = {Group: "group", Hello: "hello"}.get(type(message))
        if name is None:
            return send(channel, message)
        aim.reach(f"{name}.begin")
        sent = send(channel, message)
        aim.reach_when_sent(f"{name}.sent")
        return sent

    ZmqClient.send = watched_send  # type: ignore[method-assign]
    aim.around(Link, "answer", "answer.begin", "answer.kept")
    aim.around(AdapterRegistry, "offer", "policy.arrived", None)
