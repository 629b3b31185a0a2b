"""A rollout group as the trainer keeps it, built from a wire message after every field was checked.

Guarantee: a `RolloutGroup` that exists is self-consistent and in range, so nothing behind intake checks it again.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import decode
from protocol.messages import JOURNAL_SCHEMAS, Group

_INT32, _UINT32, _FLOAT32, _UINT8 = (np.dtype(name) for name in ("<i4", "<u4", "<f4", "u1"))


class InvalidGroupError(ValueError):
    """A group whose buffers contradict each other or the lease. The text says which and how."""


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """All completions of one prompt, scored. n completions, T sampled tokens in all, F reward functions."""

    group_id: str
    policy_version: int
    prompt_ids: NDArray[np.int32]  # (P,)
    completion_lengths: NDArray[np.int32]  # (n,)
    completion_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,), NaN where the sampler could not score a token
    rewards: NDArray[np.float32]  # (n, F), NaN where a function gave none
    truncated: NDArray[np.bool_]  # (n,), cut by max_completion_length
    token_versions: NDArray[np.int32] | None = None  # (T,), none older than policy_version; None: all of that version

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
        return len(self.completion_lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)

    def tokens_by_version(self, tokens: slice) -> dict[int, int]:
        """How many of these tokens each policy version sampled, the oldest first."""
        found, counts = np.unique(self.versions[tokens], return_counts=True)
        return dict(zip(found.tolist(), counts.tolist(), strict=True))

    def mean_reward(self, weights: NDArray[np.float32]) -> float:
        """Mean over the scored completions of the sum of rewards, weighted by `weights` (F,); NaN if none is scored."""
        scored = ~np.isnan(self.rewards).all(axis=1)
        totals = np.nansum(self.rewards[scored] * weights, axis=1)
        return float(totals.mean()) if len(totals) else float("nan")


@dataclass(frozen=True)
class GroupShape:
    """What every group of a run must look like."""

    num_generations: int
    num_rewards: int
    max_completion_length: int
    vocab_size: int

    def parse(self, message: Group) -> RolloutGroup:
        """Checks every buffer of `message` and returns the group.

        Raises:
            InvalidGroupError: a buffer is of the wrong size, or holds a value out of range.
        """
        lengths = _array(message.completion_lengths, _INT32, "completion_lengths", self.num_generations)
        counts = lengths.tolist()
        if min(counts) < 1 or max(counts) > self.max_completion_length:
            raise InvalidGroupError(f"completion_lengths must lie in 1..{self.max_completion_length}")
        num_tokens = sum(counts)
        prompt_ids = self._token_ids(message.prompt_ids, "prompt_ids", None)
        if len(prompt_ids) == 0:
            raise InvalidGroupError("prompt_ids is empty")
        logprobs = _array(message.logprobs, _FLOAT32, "logprobs", num_tokens)
        if np.fmin.reduce(logprobs) == -math.inf or np.fmax.reduce(logprobs) > 1e-3:  # both pass over NaN
            raise InvalidGroupError("logprobs must be finite and not positive (NaN for unscored tokens)")
        rewards = _array(message.rewards, _FLOAT32, "rewards", self.num_generations * self.num_rewards)
        if math.inf in map(abs, rewards.tolist()):
            raise InvalidGroupError("rewards must be finite (NaN for missing)")
        token_versions = None
        if message.token_versions:
            token_versions = _array(message.token_versions, _INT32, "token_versions", num_tokens)
            if token_versions.min() != message.policy_version:
                raise InvalidGroupError("policy_version must be the oldest of token_versions")
        return RolloutGroup(
            group_id=message.lease_id,
            policy_version=message.policy_version,
            prompt_ids=prompt_ids,
            completion_lengths=lengths,
            completion_ids=self._token_ids(message.completion_ids, "completion_ids", num_tokens),
            logprobs=logprobs,
            rewards=rewards.reshape(self.num_generations, self.num_rewards),
            truncated=_array(message.truncated, _UINT8, "truncated", self.num_generations).astype(np.bool_),
            token_versions=token_versions,
        )

    def load(self, frame: bytes) -> RolloutGroup:
        """The group in a frame that a journal kept.

        Raises:
            InvalidGroupError: as `parse`.
            CodecError: the frame is not a message.
        """
        return self.parse(decode(frame, Group, JOURNAL_SCHEMAS))

    def _token_ids(self, data: bytes, name: str, count: int | None) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = _array(data, _INT32, name, count)
        if ids.size and ids.view(_UINT32).max() >= self.vocab_size:  # a negative one is large then
            raise InvalidGroupError(f"{name} holds token ids outside 0..{self.vocab_size - 1}")
        return ids


def _array(data: bytes, dtype: np.dtype[Any], name: str, count: int | None) -> Any:
    item_bytes = dtype.itemsize
    if len(data) % item_bytes or (count is not None and len(data) != count * item_bytes):
        expected = f"{count} x {item_bytes}" if count is not None else f"a multiple of {item_bytes}"
        raise InvalidGroupError(f"{name} has {len(data)} bytes, expected {expected}")
    return np.frombuffer(data, dtype)
