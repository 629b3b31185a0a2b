"""Small things that the tests of `replay` need again and again."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from protocol.config.learning import ReplaySection, RerollSection
from protocol.wire.codec import encode
from protocol.wire.messages import Group
from replay.batch_rule import BatchRule
from replay.batch_selection import BatchSelector, OfferedGroup, TrainingBatch
from replay.buffer import Answer, RolloutBuffer
from replay.groups import GroupShape, RolloutGroup
from replay.journal.schema import JournalEntry, RecordedBatch
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId
from replay.prompt_draws import PromptDraws
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import RetryBudget
from replay.replay_table import ReplayTable
from replay.rerolls import Grade, RerollRules
from replay.rewards import SignalWatch
from replay.shares import EnvironmentShares
from replay.sources import ONE, Sources
from replay.staleness import StalenessBudget
from replay.watches import FailureWatch


class FillableJournal(Journal):
    """Its disk can be full: then every transaction ends as SQLite ends it, before its commit. Counts those,
    and the groups of every commit."""

    full = False
    refused = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.commits: list[int] = []

    def append(self, entries: Iterable[JournalEntry]) -> None:
        entries = list(entries)
        super().append(entries)
        self.commits.append(len(entries))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        with super().transaction() as db:
            yield db
            if self.full:
                self.refused += 1
                raise apsw.FullError("database or disk is full")


SHAPE = GroupShape(num_generations=2, num_rewards=1, max_completion_length=4, vocab_size=10)


def group_message(lease_id: str = "s-1", version: int = 0, **changes: Any) -> Group:
    """A valid message of SHAPE: completions [3, 4, 5] and [6], rewards 0 and 1."""
    values = {
        "lease_id": lease_id,
        "policy_version": version,
        "prompt_ids": np.array([1, 2], "<i4").tobytes(),
        "completion_lengths": np.array([3, 1], "<i4").tobytes(),
        "completion_ids": np.array([3, 4, 5, 6], "<i4").tobytes(),
        "logprobs": np.array([-0.1, -0.2, -0.3, -0.4], "<f4").tobytes(),
        "rewards": np.array([0.0, 1.0], "<f4").tobytes(),
        "truncated": bytes([0, 1]),
        "generation_s": 0.0,
        "reward_s": 0.0,
    }
    return Group(**(values | changes))


def delivery(
    lease_id: str,
    version: int = 0,
    *,
    signal: bool = True,
    rewards: tuple[float, float] | None = None,
    producer: str = "p",
) -> OfferedGroup:
    """With the rewards given, or 0 and 1, or without signal 0 and 0."""
    rewards = rewards or (0.0, float(signal))
    message = group_message(lease_id, version, rewards=np.array(rewards, "<f4").tobytes())
    return OfferedGroup(SHAPE.parse(message), encode(message), producer)


def group(lease_id: str, version: int = 0, *, signal: bool = True) -> RolloutGroup:
    return delivery(lease_id, version, signal=signal).group


def spread(candidate: RolloutGroup) -> float:
    return float(np.ptp(candidate.rewards))


def mean_reward(candidate: RolloutGroup) -> float:
    return float(candidate.rewards.mean())


def ledger(
    num_prompts: int = 4,
    *,
    data_attempts: int = 3,
    infra_attempts: int = 10,
    max_share: float = 0.5,
    max_pending: int = 8,
    backoff_s: float = 1.0,
    **changes: Any,
) -> PromptLedger:
    """No shuffling; a data failure waits 1 s, an infra failure 0.25 s, doubling."""
    budgets = {"data": RetryBudget(data_attempts, backoff_s), "infra": RetryBudget(infra_attempts, backoff_s / 4)}
    rerolls = RerollSection.model_construct(max_share=max_share, max_pending=max_pending)
    values: dict[str, Any] = {"seed": 0, "shuffle": False, "session": "s", "budgets": budgets, "rerolls": rerolls}
    return PromptLedger(num_prompts, **(values | changes))


def reroll_rules(column: int = 0, **settings: Any) -> RerollRules:
    """They are off unless `settings` turn them on, also such settings as no configuration may have."""
    return RerollRules(RerollSection.model_construct(**({"max_attempts": 0} | settings)), column)


def replay_settings(**settings: Any) -> ReplaySection:
    """Those that came first are replayed first, and make room first, if `settings` say no more; these are not checked."""
    return ReplaySection.model_construct(**({"sampler": "fifo", "remover": "oldest", "min_size": 1} | settings))


def replay_table(seed: int = 0, **settings: Any) -> ReplayTable:
    return ReplayTable(replay_settings(**settings), seed)


def unpublished_buffer(
    journal: Journal,
    num_prompts: int = 1000,
    *,
    max_failed_share: float = 0.5,
    max_groups_without_signal: int | None = None,
    data_attempts: int = 3,
    backoff_s: float = 1.0,
    session: str = "s",
    rules: RerollRules | None = None,
    replay: ReplayTable | None = None,
    max_replayed: int = 0,
    sampled: bool = False,
    draws: PromptDraws | None = None,
    sources: Sources = ONE,
    failures: FailureWatch | None = None,
    shares: EnvironmentShares | None = None,
    environment_of: Callable[[int], str] = lambda prompt_id: "",
    **budget: Any,
) -> RolloutBuffer:
    return RolloutBuffer(
        ledger(
            num_prompts,
            data_attempts=data_attempts,
            backoff_s=backoff_s,
            session=session,
            draws=draws,
            environment_of=environment_of,
        ),
        BatchSelector(
            ages := StalenessBudget(**({"groups_per_step": 2, "max_staleness": 0} | budget)),
            journal,
            (BatchRule.sampled if sampled else BatchRule.full)(ages.groups_per_step),
            signal=spread,
            replay=replay,
            max_replayed=max_replayed,
        ),
        journal,
        rules or reroll_rules(),
        mean_reward,
        failures or FailureWatch(max_failed_share),
        SignalWatch(max_groups_without_signal),
        shares,
        sources=sources,
    )


def buffer(journal: Journal, num_prompts: int = 1000, **arguments: Any) -> RolloutBuffer:
    """A buffer whose version 0 is published."""
    result = unpublished_buffer(journal, num_prompts, **arguments)
    result.published(0)
    return result


def resumed(
    journal: Journal,
    state: dict[str, Any] | None,
    step: int,
    *,
    version: int | None = None,
    comparable: bool = True,
    session: str = "t",
    **arguments: Any,
) -> RolloutBuffer:
    """A buffer of the next trainer process, which starts at a checkpoint."""
    result = unpublished_buffer(journal, session=session, **arguments)
    result.restore(state, step=step, shape=SHAPE, comparable=comparable)
    result.published(step if version is None else version)
    return result


def lease(replay: RolloutBuffer, producer: str = "p", *, now: float = 0.0, timeout_s: float = 60.0) -> str:
    record = replay.lease(producer, now=now, timeout_s=timeout_s)
    assert record is not None
    return record.lease_id


def offer(replay: RolloutBuffer, lease_id: str, version: int = 0, *, signal: bool = True) -> Answer:
    (outcome,) = replay.offer([delivery(lease_id, version, signal=signal)])
    return outcome


def fill(replay: RolloutBuffer, version: int = 0, count: int = 2) -> list[str]:
    """Leases and answers `count` prompts."""
    lease_ids = [lease(replay) for _ in range(count)]
    assert replay.offer([delivery(lease_id, version) for lease_id in lease_ids]) == ["accepted"] * count
    return lease_ids


def cut(replay: RolloutBuffer) -> TrainingBatch:
    batch = replay.next_batch(0.0)
    assert batch is not None
    return batch


def names(groups: list[RolloutGroup]) -> list[str]:
    return [g.lease_id for g in groups]


def entry(prompt_id: int, **changes: Any) -> JournalEntry:
    """The accepted first group of a prompt in epoch 0."""
    values = {
        "lease": LeaseId(
            Key(changes.pop("epoch", 0), prompt_id, changes.pop("reroll", 0)), changes.pop("attempt", 1), "s"
        ),
        "producer": "p",
        "policy_version": 0,
        "outcome": "accepted",
        "reward": 0.5,
        "grade": Grade("mixed", 2, 1),
        "num_tokens": 4,
        "frame": f"frame of prompt {prompt_id}".encode(),
        "answer": 1,
    } | changes
    return JournalEntry(**values)


def lease_ids(*prompt_ids: int) -> list[str]:
    return [entry(prompt_id).lease_id for prompt_id in prompt_ids]


def claim(journal: Journal, step: int, last_step: int, *prompt_ids: int, again: tuple[int, ...] = ()) -> None:
    """The first groups of these prompts are trained, and those of `again` are replayed."""
    journal.claim(RecordedBatch(step, last_step, lease_ids(*prompt_ids, *again), len(prompt_ids)))


def rows(journal: Journal, columns: str = "lease_id, outcome, dropped, step, last_step") -> list[tuple]:
    return journal.query(f"SELECT {columns} FROM groups ORDER BY seq")


@contextlib.contextmanager
def full_disk(journal: FillableJournal) -> Iterator[None]:
    journal.full = True
    yield
    journal.full = False


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that needs no disk where the machine has one, for tests that commit thousands of times."""
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)
