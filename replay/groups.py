"""A rollout group as the trainer keeps it, built from a wire message after every field was checked.

Guarantee: a `RolloutGroup` that exists is self-consistent and in range, so nothing behind intake checks it again.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import decode
from protocol.messages import Group


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

    @property
    def num_completions(self) -> int:
        return len(self.completion_lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)

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
        lengths = _array(message.completion_lengths, "<i4", "completion_lengths", self.num_generations)
        if lengths.min() < 1 or lengths.max() > self.max_completion_length:
            raise InvalidGroupError(f"completion_lengths must lie in 1..{self.max_completion_length}")
        num_tokens = int(lengths.sum())
        prompt_ids = self._token_ids(message.prompt_ids, "prompt_ids", None)
        if len(prompt_ids) == 0:
            raise InvalidGroupError("prompt_ids is empty")
        logprobs = _array(message.logprobs, "<f4", "logprobs", num_tokens)
        if np.isinf(logprobs).any() or (logprobs > 1e-3).any():
            raise InvalidGroupError("logprobs must be finite and not positive (NaN for unscored tokens)")
        rewards = _array(message.rewards, "<f4", "rewards", self.num_generations * self.num_rewards)
        if np.isinf(rewards).any():
            raise InvalidGroupError("rewards must be finite (NaN for missing)")
        return RolloutGroup(
            group_id=message.lease_id,
            policy_version=message.policy_version,
            prompt_ids=prompt_ids,
            completion_lengths=lengths,
            completion_ids=self._token_ids(message.completion_ids, "completion_ids", num_tokens),
            logprobs=logprobs,
            rewards=rewards.reshape(self.num_generations, self.num_rewards),
            truncated=_array(message.truncated, "u1", "truncated", self.num_generations).astype(np.bool_),
        )

    def load(self, frame: bytes) -> RolloutGroup:
        """The group in a frame that a journal kept.

        Raises:
            InvalidGroupError: as `parse`.
            CodecError: the frame is not a message.
        """
        message = decode(frame)
        assert isinstance(message, Group)
        return self.parse(message)

    def _token_ids(self, data: bytes, name: str, count: int | None) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = _array(data, "<i4", name, count)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise InvalidGroupError(f"{name} holds token ids outside 0..{self.vocab_size - 1}")
        return ids


def _array(data: bytes, dtype: str, name: str, count: int | None) -> Any:
    item_bytes = np.dtype(dtype).itemsize
    if len(data) % item_bytes or (count is not None and len(data) != count * item_bytes):
        expected = f"{count} x {item_bytes}" if count is not None else f"a multiple of {item_bytes}"
        raise InvalidGroupError(f"{name} has {len(data)} bytes, expected {expected}")
    return np.frombuffer(data, dtype)
