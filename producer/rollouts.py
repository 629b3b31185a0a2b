"""What was generated for one prompt, and the group that it becomes on the wire.

Guarantee: every record begins with the group's prompt, which is all that the records have in common, and has a sampled token
behind it; log-probs of tokens that were not sampled are 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.interfaces import Completion, LeaseFailure
from protocol.messages import Group


@dataclass
class Record:
    """A sequence that the policy saw, from its first token on. `logprobs` and `versions` are None where it sampled nothing."""

    token_ids: list[int]
    logprobs: list[float | None]
    versions: list[int | None]

    @classmethod
    def of(cls, prompt_ids: list[int]) -> "Record":
        record = cls([], [], [])
        record.show(prompt_ids)
        return record

    def show(self, token_ids: list[int]) -> None:
        """Adds what the policy did not sample."""
        self.token_ids += token_ids
        self.logprobs += [None] * len(token_ids)
        self.versions += [None] * len(token_ids)

    def sampled(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.versions += completion.token_versions or []

    @property
    def num_sampled(self) -> int:
        return sum(version is not None for version in self.versions)

    def cut(self, length: int) -> None:
        """To at most `length` tokens, of which the last was sampled."""
        while length and self.versions[length - 1] is None:
            length -= 1
        del self.token_ids[length:], self.logprobs[length:], self.versions[length:]


@dataclass
class Episode:
    """A completion: its records, and what scores it."""

    prompt_length: int
    records: list[Record]
    messages: list[dict[str, Any]] = field(default_factory=list)  # after the prompt
    truncated: bool = False
    reward: float | None = None  # the environment's own
    failure: str = ""  # why it is not scored

    @property
    def num_sampled(self) -> int:
        return sum(record.num_sampled for record in self.records)

    @property
    def versions(self) -> set[int]:
        """Those that sampled it."""
        return {version for record in self.records for version in record.versions if version is not None}

    @property
    def token_ids(self) -> list[int]:
        """Of the last record, after the prompt."""
        return self.records[-1].token_ids[self.prompt_length :]


def group_message(
    lease_id: str,
    episodes: list[Episode],
    rewards: NDArray[np.float32],
    max_completion_length: int,
    generation_s: float,
    reward_s: float,
) -> Group:
    """The group of these episodes. A record that is too long after the prompt of the group, because `reset` gave its siblings
    other prompts, loses its end; one that keeps no sampled token then is left out.

    Raises:
        LeaseFailure: the records have no token in common, or an episode keeps no record.
    """
    everything = [record for episode in episodes for record in episode.records]
    first = everything[0].token_ids
    start = min(_first(record.versions) for record in everything)
    start = min(start, *(common_length(first, record.token_ids) for record in everything))
    prompt = first[:start]
    if not prompt:
        raise LeaseFailure(
            "bad_prompt", "the prompts of the episodes have no token in common; begin them with a system message"
        )
    records, numbers, truncated = [], [], []
    for number, episode in enumerate(episodes):
        limit = len(prompt) + max_completion_length
        too_long = any(len(record.token_ids) > limit for record in episode.records)
        for record in episode.records:
            if len(record.token_ids) > limit:
                record.cut(limit)
            if len(record.token_ids) > len(prompt):
                records.append(record)
                numbers.append(number)
                truncated.append(episode.truncated or too_long)
        if number not in numbers[-1:]:
            raise LeaseFailure(
                "bad_prompt", "the prompts of the episodes differ by more than sampling.max_completion_length"
            )
    logprobs = [logprob for record in records for logprob in record.logprobs[start:]]
    versions = [version for record in records for version in _filled(record.versions[start:])]
    sampled = [version is not None for record in records for version in record.versions[start:]]
    oldest = min(versions)
    return Group(
        lease_id=lease_id,
        policy_version=oldest,
        prompt_ids=np.array(prompt, "<i4").tobytes(),
        completion_lengths=np.array([len(record.token_ids) - start for record in records], "<i4").tobytes(),
        completion_ids=np.array([token for record in records for token in record.token_ids[start:]], "<i4").tobytes(),
        logprobs=np.array([0.0 if logprob is None else logprob for logprob in logprobs], "<f4").tobytes(),
        rewards=rewards.astype("<f4").tobytes(),
        truncated=np.array(truncated, "u1").tobytes(),
        generation_s=generation_s,
        reward_s=reward_s,
        token_versions=np.array(versions, "<i4").tobytes() if max(versions) > oldest else b"",
        sampled=b"" if all(sampled) else np.array(sampled, "u1").tobytes(),
        episodes=np.array(numbers, "<i4").tobytes() if len(records) > len(episodes) else b"",
    )


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Of what both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _first(versions: list[int | None]) -> int:
    return next(place for place, version in enumerate(versions) if version is not None)


def _filled(versions: list[int | None]) -> list[int]:
    """A token that was not sampled has the version of the sampled one before it, or at the start of the first one."""
    filled = []
    last = versions[_first(versions)]
    for version in versions:
        last = last if version is None else version
        assert last is not None
        filled.append(last)
    return filled
