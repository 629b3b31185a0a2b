"""Rollout groups to the tensors that TRL's loss takes.

Guarantee: every micro-batch is padded to its own longest prompt and completion and to nothing else, and its log-probs
stand beside the tokens they were sampled with. What a group was padded to before, and any importance ratio it had, is
nowhere kept, so a group can be trained again in any company. A micro-batch has completions of as many prompts as it can,
and an optimizer step has the same number of micro-batches whether its batch is full or not.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.advantages import advantages
from replay.groups import RolloutGroup
from replay.rewards import RewardRecipe

MicroBatch = dict[str, torch.Tensor]


class _Row(NamedTuple):
    """One completion."""

    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    advantage: float
    counts: bool  # in the loss


@dataclass(frozen=True)
class BatchRecipe:
    """What turns groups into tensors, fixed for a run."""

    rewards: RewardRecipe
    num_generations: int
    num_completions: int  # of a full batch
    micro_batch_size: int  # completions
    pad_token_id: int
    scale_rewards: str
    baseline: str
    mask_truncated: bool
    seed: int

    def tensors(self, groups: list[RolloutGroup], step: int) -> list[MicroBatch]:
        """The micro-batches of the optimizer steps over one batch, on the CPU.

        Each has `prompt_ids`, `prompt_mask` (left-padded), `completion_ids`, `completion_mask` (right-padded),
        `sampling_per_token_logps`, `advantages` (B,) and `num_items_in_batch` (tokens that count, of the whole step).
        There are as many in a batch of fewer groups; what is missing is made up by rows of one token that do not count.

        Args:
            step: optimizer steps taken before the first over this batch; it decides the order of the rows.
        """
        rows = self._rows(groups)
        num_items = torch.tensor(sum(len(row.completion_ids) for row in rows if row.counts))
        rows = [rows[i] for i in self.row_order(len(groups), step)]
        rows += [self._filler] * (self.num_completions - len(rows))
        return [
            self._pad(rows[start : start + self.micro_batch_size]) | {"num_items_in_batch": num_items}
            for start in range(0, len(rows), self.micro_batch_size)
        ]

    def advantages_of(self, groups: list[RolloutGroup]) -> torch.Tensor:
        """Float32 (N,), of the completions in the order of the groups."""
        return advantages(
            torch.from_numpy(np.concatenate([self.rewards.columns(group) for group in groups])),
            torch.from_numpy(self.rewards.column_weights),
            self.num_generations,
            scale_rewards=self.scale_rewards,
            aggregation=self.rewards.aggregation,
            baseline=self.baseline,
        )

    def row_order(self, num_groups: int, step: int) -> NDArray[np.intp]:
        """A permutation of the rows: one of each group in every round, the groups of a round in the same random order.

        So any m rows in a row are of min(m, num_groups) prompts.
        """
        draw = np.random.default_rng([self.seed, step])
        rows = np.arange(num_groups * self.num_generations).reshape(num_groups, self.num_generations)
        return draw.permutation(draw.permuted(rows, axis=1)).T.ravel()

    @property
    def _filler(self) -> _Row:
        token = np.array([self.pad_token_id], np.int32)
        return _Row(token, token, np.zeros(1, np.float32), advantage=0.0, counts=False)

    def _rows(self, groups: list[RolloutGroup]) -> list[_Row]:
        values = iter(self.advantages_of(groups).tolist())
        result = []
        for group in groups:
            ends = group.completion_lengths.cumsum()
            for start, end, cut in zip(ends - group.completion_lengths, ends, group.truncated, strict=True):
                completion_ids, logprobs = group.completion_ids[start:end], group.logprobs[start:end]
                counts = not (cut and self.mask_truncated)
                result.append(_Row(group.prompt_ids, completion_ids, logprobs, next(values), counts))
        return result

    def _pad(self, rows: list[_Row]) -> MicroBatch:
        num_rows = len(rows)
        prompt_width = max(len(row.prompt_ids) for row in rows)
        width = max(len(row.completion_ids) for row in rows)
        batch = {
            "prompt_ids": torch.full((num_rows, prompt_width), self.pad_token_id),
            "prompt_mask": torch.zeros((num_rows, prompt_width), dtype=torch.long),
            "completion_ids": torch.full((num_rows, width), self.pad_token_id),
            "completion_mask": torch.zeros((num_rows, width), dtype=torch.long),
            "sampling_per_token_logps": torch.zeros((num_rows, width)),
            "advantages": torch.tensor([row.advantage for row in rows]),
        }
        for i, row in enumerate(rows):
            start, end = prompt_width - len(row.prompt_ids), len(row.completion_ids)
            batch["prompt_ids"][i, start:] = torch.from_numpy(row.prompt_ids.astype(np.int64))
            batch["prompt_mask"][i, start:] = 1
            batch["completion_ids"][i, :end] = torch.from_numpy(row.completion_ids.astype(np.int64))
            batch["completion_mask"][i, :end] = int(row.counts)
            batch["sampling_per_token_logps"][i, :end] = torch.from_numpy(row.logprobs.copy())
        return batch
