"""An intake whose ticks and clock are the test's, and producers that say what the test says."""

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from consumer.link.commit_queue import RolloutStorage
from consumer.link.dispatcher import LeaseDispatcher
from consumer.link.fleet import SessionTerms
from consumer.link.gpu_turns import GpuTurns
from consumer.link.intake import Intake
from consumer.link.offered_bundle import NO_BUNDLE, OfferedBundle
from consumer.link.policy_store import PolicyStore, PublishedPolicy
from consumer.waiting import ThreadErrors
from protocol.errors import DatasetError
from protocol.runtime.logs import Throttle
from protocol.runtime.scratch import NO_MEMORY, SharedMemory
from protocol.wire.handshake import TrainerNeeds
from protocol.wire.messages import Group, Heartbeat, Hello, Lease, Sampling
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape
from replay.journal.retention import DiskGuard
from tests.loopback import LoopbackClient, LoopbackServer
from tests.scripted import facts, made_up_group
from tests.unit.consumer.builders import live_buffer
from tests.unit.replay.builders import FillableJournal

NEEDS = TrainerNeeds("0" * 64, "1" * 64, "float32", 8, 3, 4, ("reward",))

SAMPLING = Sampling(num_generations=4, max_completion_length=4, temperature=1.0)

BLOB = bytes(range(250)) * 10

DIGEST = hashlib.sha256(BLOB).hexdigest()

SHAPE = GroupShape(num_generations=4, num_rewards=1, max_completion_length=4, vocab_size=12)


class Prompts:
    """Prompt n is "n"."""

    def __init__(self) -> None:
        self.bad: set[int] = set()
        self.columns: dict[str, Any] = {"answer": 1}

    def __getitem__(self, prompt_id: int) -> tuple[str, dict[str, Any]]:
        if prompt_id in self.bad:
            raise DatasetError(f"row {prompt_id} has no usable prompt")
        return str(prompt_id), self.columns


class Trainer:
    """An intake whose ticks and clock are the test's, with version 0 published."""

    def __init__(
        self,
        journal: FillableJournal,
        disk: DiskGuard,
        channel: Any = None,
        replay: RolloutBuffer | None = None,
        memory: SharedMemory = NO_MEMORY,
        evaluations: Any = None,
        run_id: str = "run",
        heartbeat_s: float = 1.0,
        place: tuple[str, str] = ("", ""),
        bundle: OfferedBundle = NO_BUNDLE,
        turns: GpuTurns | None = None,
        **budget: int,
    ) -> None:
        self.channel = channel or LoopbackServer()
        self.replay = replay or live_buffer(journal, **budget)
        self.now = 100.0
        self.errors = ThreadErrors()
        storage = RolloutStorage(self.replay, journal, disk)
        warn = Throttle(logging.getLogger(__name__))
        now = lambda: self.now  # noqa: E731
        dispatcher = LeaseDispatcher(self.channel, self.replay, Prompts(), disk, SAMPLING, 60.0, warn, now, evaluations)
        store = PolicyStore(2, memory)
        terms = SessionTerms(NEEDS, SHAPE, run_id, "session", 60.0, heartbeat_s, 6.0, *place, bundle, turns)
        self.intake = Intake(self.channel, storage, dispatcher, store, terms, self.errors, clock=now)
        self.publish(0, BLOB, DIGEST)

    def publish(self, version: int, data: bytes, digest: str, **more: Any) -> None:
        self.intake.publish(PublishedPolicy(version, digest, data, **more))

    def tick(self) -> None:
        self.intake.tick(0.0)

    def producer(
        self, name: str = "p", *, capacity: int = 64, held: list[str] | None = None, run_id: str = "run"
    ) -> "Producer":
        client = Producer(self, self.channel.connect(name), name)
        client.hello(capacity, held, run_id)
        return client


class Producer:
    def __init__(self, trainer: Trainer, channel: LoopbackClient, name: str) -> None:
        self.trainer = trainer
        self.channel = channel
        self.name = name
        self.inbox: list[Any] = []

    def hello(self, capacity: int = 64, held: list[str] | None = None, run_id: str = "", **changes: Any) -> list[Any]:
        return self.say(Hello(self.name, facts(**changes), capacity, held or [], run_id=run_id))

    def say(self, *messages: Any) -> list[Any]:
        """Sends, lets the trainer tick, and returns everything that came back."""
        for message in messages:
            assert self.channel.send(message)
        self.trainer.tick()
        return self.hear()

    def hear(self) -> list[Any]:
        arrived = self.channel.poll(0.0)
        self.inbox += arrived
        return arrived

    def all(self, kind: type) -> list[Any]:
        self.hear()
        return [message for message in self.inbox if isinstance(message, kind)]

    @property
    def leases(self) -> list[Lease]:
        return self.all(Lease)

    def beat(self, tokens: int = 0, version: int = 0, capacity: int = 64, held: list[str] | None = None) -> list[Any]:
        """By default it names all leases that it ever got."""
        names = [lease.lease_id for lease in self.leases] if held is None else held
        return self.say(Heartbeat(version, capacity, names, tokens, 0.0))


Start = Callable[..., Trainer]


def only(messages: list[Any], kind: type) -> Any:
    [message] = [message for message in messages if isinstance(message, kind)]
    return message


def answer(lease: Lease, version: int = 0, **changes: Any) -> Group:
    return made_up_group(lease, version, **changes)


def made_lease(lease_id: str) -> Lease:
    return Lease(lease_id, 0, 1, "0", {}, SAMPLING, 0, 60.0)
