"""A producer without an engine, for tests: it speaks the real protocol and answers every lease with made-up completions.

The completions depend on the lease alone (seeded by the prompt, its return and the attempt), so a run against it is
reproducible.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal, Self

import msgspec
import numpy as np

from protocol.wire.messages import (
    Ack,
    Bye,
    EngineFacts,
    Group,
    Heartbeat,
    Hello,
    Lease,
    Nack,
    Policy,
    Reject,
    Welcome,
)

Answer = Callable[[Lease, int], Group | Nack]

_PATIENCE_S = 5.0
"""A trainer that hears a second hello, because it was slow to answer the first one, gives the leases of the first one again."""


def facts(**changes: object) -> EngineFacts:
    values = {
        "base_model_digest": "0" * 64,
        "tokenizer_digest": "1" * 64,
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "max_lora_rank": 64,
        "max_loras": 64,
        "max_model_len": 1024,
        "reward_names": ["reward"],
    }
    return EngineFacts(**(values | changes))  # type: ignore[arg-type]


def return_of(lease: Lease) -> int:
    """How often the prompt had come back in its epoch; 0 for a lease that no ledger made."""
    parts = lease.lease_id.split("-")
    return int(parts[2]) if len(parts) == 5 else 0


def half_without_signal(lease: Lease, policy_version: int) -> Group:
    """Every second group has no signal, and in every fourth all completions fail until the prompt comes back."""
    n, kind = lease.sampling.num_generations, lease.prompt_id % 4
    rewards = [0.0 if kind == 1 and not return_of(lease) else 0.5] * n if kind % 2 else None
    return made_up_group(lease, policy_version, rewards=rewards)


def made_up_group(
    lease: Lease, policy_version: int, *, vocab_size: int = 12, rewards: list[float] | None = None
) -> Group:
    """A group of random tokens whose rewards are 0, 1, 0, 1, ... unless given."""
    rng = np.random.default_rng([lease.prompt_id, lease.attempt, return_of(lease)])
    n = lease.sampling.num_generations
    lengths = rng.integers(1, lease.sampling.max_completion_length + 1, n)
    total = int(lengths.sum())
    values = rewards if rewards is not None else [float(i % 2) for i in range(n)]
    return Group(
        lease_id=lease.lease_id,
        policy_version=policy_version,
        prompt_ids=rng.integers(1, vocab_size, 5).astype("<i4").tobytes(),
        completion_lengths=lengths.astype("<i4").tobytes(),
        completion_ids=rng.integers(1, vocab_size, total).astype("<i4").tobytes(),
        logprobs=np.log(rng.uniform(0.02, 0.2, total)).astype("<f4").tobytes(),
        rewards=np.array(values, "<f4").tobytes(),
        truncated=(lengths == lease.sampling.max_completion_length).astype("u1").tobytes(),
        generation_s=0.0,
        reward_s=0.0,
    )


def made_up_episodes(lease: Lease, policy_version: int) -> Group:
    """The same for an environment: every second episode has two records, and every third token was not sampled."""
    n = lease.sampling.num_generations
    episodes = np.array([number for number in range(n) for _ in range(1 + number % 2)], "<i4")
    sampling = msgspec.structs.replace(lease.sampling, num_generations=len(episodes))
    group = made_up_group(msgspec.structs.replace(lease, sampling=sampling), policy_version)
    sampled, start = np.ones(len(group.logprobs) // 4, "u1"), 0
    for length in np.frombuffer(group.completion_lengths, "<i4").tolist():
        sampled[start + 1 : start + length - 1 : 3] = 0
        start += length
    return msgspec.structs.replace(
        group,
        rewards=np.frombuffer(group.rewards, "<f4")[:n].tobytes(),
        logprobs=np.where(sampled, np.frombuffer(group.logprobs, "<f4"), 0).astype("<f4").tobytes(),
        sampled=sampled.tobytes(),
        episodes=episodes.tobytes(),
    )


class ScriptedProducer:
    """Runs on a thread over any `ClientChannel` until the trainer says goodbye or `stop` is called."""

    def __init__(
        self,
        channel,
        engine: EngineFacts,
        *,
        name: str = "scripted",
        capacity: int = 64,
        answer: Answer = made_up_group,
        evaluates: bool = False,
        swap_mode: Literal["adapter", "merged", "full"] = "adapter",
    ):
        self.channel = channel
        self.engine = engine
        self.name = name
        self.capacity = capacity
        self.answer = answer
        self.evaluates = evaluates
        self.swap_mode = swap_mode
        self.acks: list[Ack] = []
        self.nacks: list[Nack] = []
        self.versions: list[int] = []
        self.rejected: Reject | None = None
        self.farewell: str | None = None
        self._policy_version = -1
        self._said_hello = -_PATIENCE_S
        self._stopping = False
        self._waiting: list[Lease] = []
        self._unacknowledged: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the scripted producer is still running"

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(10)

    def _run(self) -> None:
        last_beat = 0.0
        while not self._stopping and self.farewell is None and self.rejected is None:
            arrived = self.channel.poll(0.05)
            while arrived:  # all of it, so that a heartbeat names every lease that has arrived
                for message in arrived:
                    self._receive(message)
                arrived = self.channel.poll(0)
            now = time.monotonic()
            if self._policy_version < 0 and now - self._said_hello > _PATIENCE_S:
                hello = Hello(self.name, self.engine, self.capacity, swap_mode=self.swap_mode, evaluates=self.evaluates)
                if self.channel.send(hello):
                    self._said_hello = now
            elif self._policy_version >= 0 and now - last_beat > 0.3:
                held = [lease.lease_id for lease in self._waiting] + sorted(self._unacknowledged)
                self.channel.send(Heartbeat(self._policy_version, self.capacity, held, 0, 0.0))
                last_beat = now
            self._answer_ready()
        self.channel.close()

    def _receive(self, message) -> None:
        match message:
            case Welcome() | Policy():
                self._saw(message.policy.version)
            case Ack():
                self.acks.append(message)
                self._unacknowledged.discard(message.lease_id)
                self._saw(message.policy.version)
            case Nack():
                self.nacks.append(message)
                self._unacknowledged.discard(message.lease_id)
            case Lease():
                self._waiting.append(message)
            case Reject():
                self.rejected = message
            case Bye(reason="unknown_session"):
                self._policy_version = -1
                self._said_hello = -_PATIENCE_S
                self._unacknowledged.clear()
            case Bye():
                self.channel.send(Bye("stopping"))
                self.farewell = message.reason

    def _saw(self, version: int) -> None:
        if version != self._policy_version:
            self.versions.append(version)
        self._policy_version = version

    def _answer_ready(self) -> None:
        ready = [lease for lease in self._waiting if lease.policy_floor <= self._policy_version]
        self._waiting = [lease for lease in self._waiting if lease.policy_floor > self._policy_version]
        for lease in ready:
            version = lease.evaluates.version if lease.evaluates else self._policy_version
            answer = self.answer(lease, version)
            if self.channel.send(answer) and isinstance(answer, Group):
                self._unacknowledged.add(lease.lease_id)  # a heartbeat may overtake it: it takes another socket
