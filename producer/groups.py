"""Completions of one prompt, and the group that they become on the wire.

Guarantee: every record begins with the group's prompt, which is all that the records have in common, and has a sampled token
behind it; log-probs of tokens that were not sampled are 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.engine_contract import Completion
from protocol.wire.messages import FailureReason, Group, MissingReward

_LARGEST = float(np.finfo(np.float32).max)


class LeaseFailure(Exception):  # noqa: N818 - a result that travels to the trainer, not a defect
    """Reason why one lease cannot be answered with a group. It is data: the daemon goes on."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FailureReason = reason
        self.detail = detail


@dataclass(eq=False)
class Record:
    """A sequence that the policy saw, from its first token on. What it did not sample has log-prob 0 and version -1. `credit`
    has the reward of a span at the last sampled token of it, and NaN everywhere else."""

    token_ids: list[int]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    credit: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        self.credit = np.full(len(self.token_ids), np.nan, "<f4")

    @classmethod
    def of(cls, prompt_ids: list[int]) -> "Record":
        return cls(list(prompt_ids), np.zeros(len(prompt_ids), "<f4"), np.full(len(prompt_ids), -1, "<i4"))

    def show(self, token_ids: list[int]) -> None:
        """Add what the policy did not sample."""
        self._add(Record.of(token_ids))

    def sampled(self, completion: Completion) -> None:
        logprobs, versions = np.array(completion.logprobs, "<f4"), np.array(completion.token_versions, "<i4")
        self._add(Record(completion.token_ids, logprobs, versions))

    def _add(self, rest: "Record") -> None:
        self.token_ids += rest.token_ids
        self.logprobs = np.concatenate([self.logprobs, rest.logprobs])
        self.versions = np.concatenate([self.versions, rest.versions])
        self.credit = np.concatenate([self.credit, rest.credit])

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        return self.versions >= 0

    @property
    def num_sampled(self) -> int:
        return int(self.is_sampled.sum())

    @property
    def first_sampled(self) -> int:
        return int(self.is_sampled.argmax())

    def reward(self, end: int, reward: float) -> None:
        """Add the reward of a span of which `end` is the place behind its last token. It lies on the last sampled token up to
        there, or on the first one of the record if there is none."""
        place = int(np.flatnonzero(self.is_sampled[:end]).max(initial=-1))
        place = self.first_sampled if place < 0 else place
        before = 0.0 if np.isnan(self.credit[place]) else float(self.credit[place])
        self.credit[place] = min(max(before + reward, -_LARGEST), _LARGEST)

    def cut(self, length: int, *, is_given: bool = False) -> "Record":
        """Return its first tokens, at most `length`, up to the last sampled one among them, which gets the rewards of spans that
        end behind it. If rewards are advantages (`is_given`), only the span that is cut keeps its own."""
        end = int(np.flatnonzero(self.is_sampled[:length]).max(initial=-1)) + 1
        kept = Record(self.token_ids[:end], self.logprobs[:end], self.versions[:end])
        kept.credit = self.credit[:end].copy()
        lost = self.credit[end:][~np.isnan(self.credit[end:])]
        if is_given:
            lost = lost[: np.isnan(kept.credit[-1:]).sum()]
        if end and len(lost):
            kept.reward(end, float(lost.sum(dtype=np.float64)))
        return kept


@dataclass(eq=False)
class Episode:
    """A completion: its records, and what scores it."""

    prompt_length: int
    records: list[Record]
    messages: list[dict[str, Any]] = field(default_factory=list)  # after the prompt
    truncated: bool = False
    reward: float | None = None  # the environment's own
    failure: str = ""  # why it is not scored
    branch_length: int = 0  # tokens up to where it branched from a trunk
    is_outage: bool = False  # whether a server that was down or busy failed it

    @classmethod
    def of(cls, prompt_ids: list[int], completion: Completion) -> "Episode":
        """Make an episode that is over with this completion."""
        record = Record.of(prompt_ids)
        record.sampled(completion)
        return cls(len(prompt_ids), [record], truncated=completion.truncated)

    def reward_spans(self, spans: Iterable[tuple[int, float]]) -> None:
        """Add rewards of spans; an end counts the tokens of the last record after the prompt. Spans of a trunk are left out."""
        for end, reward in spans:
            if self.prompt_length + end > self.branch_length:
                self.records[-1].reward(self.prompt_length + end, reward)

    def forget_spans(self) -> None:
        """Drop all rewards of spans."""
        for record in self.records:
            record.credit[:] = np.nan

    @property
    def failure_reason(self) -> FailureReason:
        """Return the reason for which its lease fails, if that is due to it. An outage is no fault of the prompt."""
        return "generation_failed" if self.is_outage else "environment_failed"

    @property
    def num_sampled(self) -> int:
        return sum(record.num_sampled for record in self.records)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all records, prompts included."""
        return sum(len(record.token_ids) for record in self.records)

    @property
    def versions(self) -> set[int]:
        """Return the versions that sampled its tokens."""
        return {version for record in self.records for version in np.unique(record.versions).tolist() if version >= 0}

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens of the last record after the prompt."""
        return self.records[-1].token_ids[self.prompt_length :]


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Completions of one lease, as episodes. Reward functions see the text or the messages of each, in `completions`. Rewards
    that came with them are in `own_rewards`: float32 (episodes, names), NaN for missing."""

    episodes: list[Episode]
    generation_s: float
    completions: list[str] | list[list[dict[str, Any]]]
    own_rewards: NDArray[np.float32] = field(default_factory=lambda: np.zeros((1, 0), np.float32))

    @property
    def versions(self) -> set[int]:
        """Return the versions that sampled its tokens."""
        return set().union(*(episode.versions for episode in self.episodes))

    @property
    def policy_version(self) -> int:
        """The oldest that sampled a token of it."""
        return min(self.versions)


def group_message(
    lease_id: str,
    episodes: list[Episode],
    rewards: NDArray[np.float32],
    max_completion_length: int,
    generation_s: float,
    reward_s: float,
    missing: tuple[MissingReward, ...] = (),
    *,
    is_given: bool = False,
) -> Group:
    """The group of these episodes. A record that is too long after the prompt of the group, because `reset` gave its siblings
    other prompts, loses its end, as `Record.cut` does; one that keeps no sampled token then is left out. Raises LeaseFailure
    where the records have no token in common or an episode keeps none."""
    everything = [record for episode in episodes for record in episode.records]
    prompt = everything[0].token_ids[: min(record.first_sampled for record in everything)]
    start = min(common_length(prompt, record.token_ids) for record in everything)
    prompt = prompt[:start]
    if not prompt:
        raise LeaseFailure(
            "bad_prompt", "the prompts of the episodes have no token in common; begin them with a system message"
        )
    records, numbers, truncated = [], [], []
    for number, episode in enumerate(episodes):
        limit = len(prompt) + max_completion_length
        too_long = any(len(record.token_ids) > limit for record in episode.records)
        for record in episode.records:
            kept = record.cut(limit, is_given=is_given) if len(record.token_ids) > limit else record
            if len(kept.token_ids) > len(prompt):
                records.append(kept)
                numbers.append(number)
                truncated.append(episode.truncated or too_long)
        if number not in numbers[-1:]:
            raise LeaseFailure(
                "bad_prompt", "the prompts of the episodes differ by more than sampling.max_completion_length"
            )
    sampled = np.concatenate([record.is_sampled[start:] for record in records])
    versions = np.concatenate([_filled(record.versions[start:]) for record in records])
    credit = np.concatenate([record.credit[start:] for record in records])
    span_ends = ~np.isnan(credit)
    oldest = int(versions.min())
    return Group(
        lease_id=lease_id,
        policy_version=oldest,
        prompt_ids=np.array(prompt, "<i4").tobytes(),
        completion_lengths=np.array([len(record.token_ids) - start for record in records], "<i4").tobytes(),
        completion_ids=np.concatenate([np.array(record.token_ids[start:], "<i4") for record in records]).tobytes(),
        logprobs=np.concatenate([record.logprobs[start:] for record in records]).tobytes(),
        rewards=rewards.astype("<f4").tobytes(),
        truncated=np.array(truncated, "u1").tobytes(),
        generation_s=generation_s,
        reward_s=reward_s,
        token_versions=versions.tobytes() if versions.max() > oldest else b"",
        sampled=b"" if sampled.all() else sampled.tobytes(),
        episodes=np.array(numbers, "<i4").tobytes() if len(records) > len(episodes) else b"",
        missing=missing,
        credit=np.where(span_ends, credit, 0).astype("<f4").tobytes() if span_ends.any() else b"",
        span_ends=span_ends.tobytes() if span_ends.any() else b"",
    )


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    if other[: len(one)] == one:  # the usual case, and much faster than token by token
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _filled(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """A token that was not sampled has the version of the sampled one before it, or at the start of the first one."""
    sampled = versions >= 0
    sources = np.maximum.accumulate(np.where(sampled, np.arange(len(versions)), sampled.argmax()))
    return np.take(versions, sources)
