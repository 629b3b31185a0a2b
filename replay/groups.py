"""A rollout group as the trainer keeps it, built from a wire message after every field was checked.

Guarantee: a `RolloutGroup` that exists is self-consistent and in range, so nothing behind intake checks it again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.config.distillation import MOST_TOP
from protocol.wire.codec import decode
from protocol.wire.messages import Group, Logged
from replay.lease_ids import LeaseId

_INT32, _UINT32, _FLOAT32, _UINT8 = (np.dtype(name) for name in ("<i4", "<u4", "<f4", "u1"))
_ROUNDING = 1e-3  # by which a log-prob may be above 0, or a sum of probabilities above 1


class InvalidGroupError(ValueError):
    """A group whose buffers contradict each other or the lease. The text says which and how."""


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """Completions of one prompt, scored. n completions in R records of T tokens in all, F reward functions.

    A record is a sequence that the policy saw. A completion has one, and more only where a chat template rewrote the history of
    an episode between two of its turns.
    """

    lease_id: str
    policy_version: int
    prompt_ids: NDArray[np.int32]  # (P,)
    completion_lengths: NDArray[np.int32]  # (R,)
    completion_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,), NaN where the sampler could not score a token; 0 where not `sampled`
    rewards: NDArray[np.float32]  # (n, F), NaN where a function gave none
    truncated: NDArray[np.bool_]  # (R,), cut by max_completion_length
    token_versions: NDArray[np.int32] | None = None  # (T,), none older than policy_version; None: all of that version
    sampled: NDArray[np.bool_] | None = None  # (T,), at least one of each record; None: all
    episodes: NDArray[np.int32] | None = None  # (R,), the completion of each record, in order; None: one record each
    credit: NDArray[np.float32] | None = None  # (T,), the reward of the span that ends with a token; 0 where none ends
    span_ends: NDArray[np.bool_] | None = None  # (T,), some of `sampled`; None, like `credit`: no span has a reward
    teacher_logprobs: NDArray[np.float32] | None = None  # (T,), 0 where not `sampled`; None: no teacher was asked
    teacher_top_ids: NDArray[np.int32] | None = None  # (T, k), the teacher's likeliest tokens; -1: none
    teacher_top_logprobs: NDArray[np.float32] | None = None  # (T, k), 0 beside -1; None, like the ids: k is 0
    generation_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # that reward functions logged

    @cached_property
    def lease(self) -> LeaseId:
        """The lease that the group answers, unless that is one of an evaluation. Raises UnknownLeaseError if no trainer wrote
        the id."""
        return LeaseId.parse(self.lease_id)

    @property
    def newest_version(self) -> int:
        return self.policy_version if self.token_versions is None else int(self.token_versions.max())

    @property
    def versions(self) -> NDArray[np.int32]:
        """The policy version that sampled each token (T,)."""
        if self.token_versions is None:
            return np.full(self.num_tokens, self.policy_version, np.int32)
        return self.token_versions

    @property
    def num_completions(self) -> int:
        return len(self.rewards)

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """The mask of the tokens that the policy sampled (T,)."""
        return np.ones(self.num_tokens, np.bool_) if self.sampled is None else self.sampled

    @property
    def completion_of(self) -> NDArray[np.int32]:
        """The completion of each record (R,)."""
        return np.arange(self.num_completions, dtype=np.int32) if self.episodes is None else self.episodes

    @property
    def records(self) -> list[slice]:
        """The slice of each record's tokens, R of them."""
        ends = self.completion_lengths.cumsum().tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def last_record(self, completion: int) -> slice:
        """Return the slice of a completion's last record: all of it, unless the chat template rewrote its history."""
        return self.records[int(np.searchsorted(self.completion_of, completion, side="right")) - 1]

    @property
    def sampled_lengths(self) -> NDArray[np.int32]:
        """Tokens that the policy sampled for each completion (n,)."""
        if self.sampled is None and self.episodes is None:
            return self.completion_lengths
        owners = np.repeat(self.completion_of, self.completion_lengths)
        return self._per_completion(np.add, owners, self.is_sampled, np.int32)

    @property
    def longest_lengths(self) -> NDArray[np.int32]:
        """Tokens of the longest record of each completion (n,)."""
        return self._per_completion(np.maximum, self.completion_of, self.completion_lengths, np.int32)

    @property
    def was_truncated(self) -> NDArray[np.bool_]:
        """The mask of the truncated completions (n,)."""
        return self._per_completion(np.logical_or, self.completion_of, self.truncated, np.bool_)

    def _per_completion(
        self, combine: np.ufunc, owners: NDArray[Any], values: NDArray[Any], dtype: Any
    ) -> NDArray[Any]:
        """The values of each completion, combined; `owners` says whose each value is."""
        result = np.zeros(self.num_completions, dtype)
        combine.at(result, owners, values)
        return result

    def span_rewards(self, tokens: slice) -> dict[int, float]:
        """Return the rewards of spans by the token that they end with, counted from the first of these tokens."""
        if self.credit is None or self.span_ends is None:
            return {}
        ends = np.flatnonzero(self.span_ends[tokens])
        return dict(zip(ends.tolist(), self.credit[tokens][ends].tolist(), strict=True))

    def tokens_by_version(self, tokens: slice) -> dict[int, int]:
        """Return how many of these tokens each policy version sampled, the oldest first."""
        found, counts = np.unique(self.versions[tokens][self.is_sampled[tokens]], return_counts=True)
        return dict(zip(found.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class GroupShape:
    """The shape that every group of a run must have."""

    num_generations: int
    num_rewards: int
    max_completion_length: int
    vocab_size: int
    has_teacher: bool = False  # a teacher must have been asked
    teacher_top_k: int = 0  # for so many of its likeliest tokens; 0: for any number

    def parse(self, message: Group) -> RolloutGroup:
        """Check every buffer of `message` and returns the group. Raises InvalidGroupError."""
        episodes = self._episodes(message.episodes) if message.episodes else None
        num_records = self.num_generations if episodes is None else len(episodes)
        lengths = _array(message.completion_lengths, _INT32, "completion_lengths", num_records)
        counts = lengths.tolist()
        if min(counts) < 1 or max(counts) > self.max_completion_length:
            raise InvalidGroupError(f"completion_lengths must lie in 1..{self.max_completion_length}")
        num_tokens = sum(counts)
        prompt_ids = self._token_ids(message.prompt_ids, "prompt_ids", None)
        if len(prompt_ids) == 0:
            raise InvalidGroupError("prompt_ids is empty")
        logprobs = _array(message.logprobs, _FLOAT32, "logprobs", num_tokens)
        if (logprobs == -math.inf).any() or (logprobs > _ROUNDING).any():  # neither is NaN, nor hidden by one
            raise InvalidGroupError("logprobs must be finite and not positive (NaN for unscored tokens)")
        rewards = _array(message.rewards, _FLOAT32, "rewards", self.num_generations * self.num_rewards)
        if math.inf in map(abs, rewards.tolist()):
            raise InvalidGroupError("rewards must be finite (NaN for missing)")
        if not all(map(math.isfinite, message.logged.metrics.values())):
            raise InvalidGroupError("logged metrics must be finite")
        if any(len(texts) != self.num_generations for texts in message.logged.extra.values()):
            raise InvalidGroupError("logged columns must have a text for each completion")
        token_versions = None
        if message.token_versions:
            token_versions = _array(message.token_versions, _INT32, "token_versions", num_tokens)
            if token_versions.min() != message.policy_version:
                raise InvalidGroupError("policy_version must be the oldest of token_versions")
        sampled = _sampled(message.sampled, lengths, logprobs) if message.sampled else None
        credit, span_ends = _credit(message, num_tokens, sampled)
        if self.has_teacher and not message.teacher_logprobs:
            raise InvalidGroupError("teacher_logprobs is empty, and this run learns from teachers")
        group = RolloutGroup(
            lease_id=message.lease_id,
            policy_version=message.policy_version,
            prompt_ids=prompt_ids,
            completion_lengths=lengths,
            completion_ids=self._token_ids(message.completion_ids, "completion_ids", num_tokens),
            logprobs=logprobs,
            rewards=rewards.reshape(self.num_generations, self.num_rewards),
            truncated=_array(message.truncated, _UINT8, "truncated", num_records).astype(np.bool_),
            token_versions=token_versions,
            sampled=sampled,
            episodes=episodes,
            credit=credit,
            span_ends=span_ends,
            teacher_logprobs=_teacher_logprobs(message.teacher_logprobs, num_tokens, sampled),
            generation_s=message.generation_s,
            metrics=message.logged.metrics,
        )
        if not message.teacher_top_ids and not message.teacher_top_logprobs and not self.teacher_top_k:
            return group
        ids, top_logprobs = self._teacher_top(message, group)
        return replace(group, teacher_top_ids=ids, teacher_top_logprobs=top_logprobs)

    def load(self, frame: bytes) -> RolloutGroup:
        """The group in a frame that a journal kept. Raises as `parse`, and CodecError if the frame is not a message."""
        return self.parse(decode(frame, Group))

    def _teacher_top(self, message: Group, group: RolloutGroup) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Parse a teacher's likeliest tokens: those of sampled tokens, with probabilities of at most 1 together."""
        k, num_tokens = self.teacher_top_k or len(message.teacher_top_ids) // (4 * group.num_tokens), group.num_tokens
        if not 1 <= k <= MOST_TOP:
            raise InvalidGroupError(
                f"teacher_top_ids has {len(message.teacher_top_ids)} bytes, expected {num_tokens} x 4 x (1 to {MOST_TOP})"
            )
        if group.teacher_logprobs is None:
            raise InvalidGroupError("teacher_logprobs is empty, and teacher_top_ids is not")
        ids = _array(message.teacher_top_ids, _INT32, "teacher_top_ids", num_tokens * k).reshape(-1, k)
        logprobs = _array(message.teacher_top_logprobs, _FLOAT32, "teacher_top_logprobs", num_tokens * k).reshape(-1, k)
        is_none, in_order = ids == -1, np.sort(ids)
        _refuse((ids < -1) | (ids >= self.vocab_size), f"teacher_top_ids must lie in -1..{self.vocab_size - 1}")
        _refuse(
            (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0), "teacher_top_ids must not repeat a token"
        )
        _refuse(~is_none & ~group.is_sampled[:, None], "teacher_top_ids must be -1 for tokens that were not sampled")
        refused = ~np.isfinite(logprobs) | (logprobs > _ROUNDING) | (is_none & (logprobs != 0))
        _refuse(refused, "teacher_top_logprobs must be finite and not positive, and 0 beside a token -1")
        is_apart = group.is_sampled & (ids != group.completion_ids[:, None]).all(1)
        total = np.where(is_none, 0.0, np.exp(logprobs)).sum(1) + np.where(
            is_apart, np.exp(group.teacher_logprobs), 0.0
        )
        _refuse(total[:, None] > 1 + _ROUNDING, "probabilities of teacher_top_logprobs must add up to at most 1")
        return ids, logprobs

    def _episodes(self, data: bytes) -> NDArray[np.int32]:
        episodes: NDArray[np.int32] = _array(data, _INT32, "episodes", None)
        steps = np.diff(episodes.astype(np.int64), prepend=-1, append=self.num_generations)
        if steps[0] != 1 or steps[-1] != 1 or ((steps != 0) & (steps != 1)).any():
            raise InvalidGroupError(f"episodes must name each of 0..{self.num_generations - 1}, in order")
        return episodes

    def _token_ids(self, data: bytes, name: str, count: int | None) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = _array(data, _INT32, name, count)
        if ids.size and ids.view(_UINT32).max() >= self.vocab_size:  # a negative one is large then
            raise InvalidGroupError(f"{name} holds token ids outside 0..{self.vocab_size - 1}")
        return ids


def _sampled(data: bytes, lengths: NDArray[np.int32], logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Parse the mask of sampled tokens: at least one per record. Lengths are positive and add up to the log-probs."""
    sampled: NDArray[np.uint8] = _array(data, _UINT8, "sampled", len(logprobs))
    if sampled.max() > 1 or not np.logical_or.reduceat(sampled, lengths.cumsum() - lengths).all():
        raise InvalidGroupError("sampled must be 0 or 1, and 1 for some token of each record")
    if (logprobs[sampled == 0] != 0).any():
        raise InvalidGroupError("logprobs must be 0 for tokens that were not sampled")
    return sampled.astype(np.bool_)


def _credit(
    message: Group, num_tokens: int, sampled: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float32] | None, NDArray[np.bool_] | None]:
    """Parse the rewards of spans: finite, and at the ends of spans alone, which are sampled tokens."""
    if not message.credit and not message.span_ends:
        return None, None
    credit: NDArray[np.float32] = _array(message.credit, _FLOAT32, "credit", num_tokens)
    ends: NDArray[np.uint8] = _array(message.span_ends, _UINT8, "span_ends", num_tokens)
    if ends.max() != 1 or (sampled is not None and ends[~sampled].any()):
        raise InvalidGroupError("span_ends must be 0 or 1, 1 for some token, and 0 for tokens that were not sampled")
    refused = ~np.isfinite(credit) | ((credit != 0) & (ends == 0))
    if refused.any():
        token = int(refused.argmax())
        raise InvalidGroupError(
            f"credit must be finite, and 0 where no span ends, and is {credit[token]} at token {token}"
        )
    return credit, ends.astype(np.bool_)


def _teacher_logprobs(data: bytes, num_tokens: int, sampled: NDArray[np.bool_] | None) -> NDArray[np.float32] | None:
    """Parse a teacher's log-probs: of all sampled tokens, and of no others."""
    if not data:
        return None
    found: NDArray[np.float32] = _array(data, _FLOAT32, "teacher_logprobs", num_tokens)
    refused = ~np.isfinite(found) | (found > _ROUNDING)
    if sampled is not None:
        refused |= (found != 0) & ~sampled
    if refused.any():
        token = int(refused.argmax())
        raise InvalidGroupError(
            "teacher_logprobs must be finite and not positive, and 0 for tokens that were not sampled, and is "
            f"{found[token]} at token {token}"
        )
    return found


def _refuse(is_wrong: NDArray[np.bool_], rule: str) -> None:
    """Refuse rows of tokens with anything wrong."""
    if is_wrong.any():
        raise InvalidGroupError(f"{rule}, unlike those at token {int(is_wrong.any(1).argmax())}")


def _array(data: bytes, dtype: np.dtype[Any], name: str, count: int | None) -> Any:
    item_bytes = dtype.itemsize
    if len(data) % item_bytes or (count is not None and len(data) != count * item_bytes):
        expected = f"{count} x {item_bytes}" if count is not None else f"a multiple of {item_bytes}"
        raise InvalidGroupError(f"{name} has {len(data)} bytes, expected {expected}")
    return np.frombuffer(data, dtype)


def message_of(group: RolloutGroup) -> Group:
    """Return the group as a producer sends it; `GroupShape.parse` inverts it."""
    return Group(
        lease_id=group.lease_id,
        policy_version=group.policy_version,
        prompt_ids=group.prompt_ids.astype("<i4").tobytes(),
        completion_lengths=group.completion_lengths.astype("<i4").tobytes(),
        completion_ids=group.completion_ids.astype("<i4").tobytes(),
        logprobs=group.logprobs.astype("<f4").tobytes(),
        rewards=group.rewards.astype("<f4").tobytes(),
        truncated=group.truncated.astype("u1").tobytes(),
        generation_s=group.generation_s,
        reward_s=0.0,
        token_versions=b"" if group.token_versions is None else group.token_versions.astype("<i4").tobytes(),
        sampled=b"" if group.sampled is None else group.sampled.astype("u1").tobytes(),
        episodes=b"" if group.episodes is None else group.episodes.astype("<i4").tobytes(),
        credit=b"" if group.credit is None else group.credit.astype("<f4").tobytes(),
        span_ends=b"" if group.span_ends is None else group.span_ends.astype("u1").tobytes(),
        teacher_logprobs=b"" if group.teacher_logprobs is None else group.teacher_logprobs.astype("<f4").tobytes(),
        teacher_top_ids=b"" if group.teacher_top_ids is None else group.teacher_top_ids.astype("<i4").tobytes(),
        teacher_top_logprobs=b""
        if group.teacher_top_logprobs is None
        else group.teacher_top_logprobs.astype("<f4").tobytes(),
        logged=Logged(dict(group.metrics)),
    )
