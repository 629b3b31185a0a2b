"""Rollout groups to the tensors that TRL's loss takes.

Guarantee: every micro-batch is padded to its own longest prompt and completion and to nothing else, and its log-probs
stand beside the tokens they were sampled with.
"""

from dataclasses import dataclass

import numpy as np
import torch

from consumer.advantages import advantages
from replay.groups import RolloutGroup

MicroBatch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BatchRecipe:
    """What turns groups into tensors, fixed for a run."""

    weights: torch.Tensor  # (F,)
    num_generations: int
    micro_batch_size: int  # completions
    pad_token_id: int
    scale_rewards: str
    aggregation: str
    mask_truncated: bool

    def tensors(self, groups: list[RolloutGroup]) -> list[MicroBatch]:
        """The micro-batches of one optimizer step, on the CPU.

        Each has `prompt_ids`, `prompt_mask` (left-padded), `completion_ids`, `completion_mask` (right-padded),
        `sampling_per_token_logps`, `advantages` (B,) and `num_items_in_batch` (tokens of the whole step).
        """
        rewards = torch.from_numpy(np.concatenate([group.rewards for group in groups]))
        values = advantages(
            rewards,
            self.weights,
            self.num_generations,
            scale_rewards=self.scale_rewards,
            aggregation=self.aggregation,
        )
        rows = [row for group in groups for row in self._rows(group)]
        num_items = torch.tensor(sum(len(ids) for _, ids, _, counts in rows if counts))
        return [
            self._pad(rows[start : start + self.micro_batch_size])
            | {"advantages": values[start : start + self.micro_batch_size], "num_items_in_batch": num_items}
            for start in range(0, len(rows), self.micro_batch_size)
        ]

    def _rows(self, group: RolloutGroup) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]]:
        """Prompt ids, completion ids, log-probs, and whether the completion counts in the loss."""
        ends = group.completion_lengths.cumsum()
        return [
            (
                group.prompt_ids,
                group.completion_ids[start:end],
                group.logprobs[start:end],
                not (cut and self.mask_truncated),
            )
            for start, end, cut in zip(ends - group.completion_lengths, ends, group.truncated, strict=True)
        ]

    def _pad(self, rows: list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]]) -> MicroBatch:
        num_rows = len(rows)
        prompt_width = max(len(row[0]) for row in rows)
        width = max(len(row[1]) for row in rows)
        batch = {
            "prompt_ids": torch.full((num_rows, prompt_width), self.pad_token_id),
            "prompt_mask": torch.zeros((num_rows, prompt_width), dtype=torch.long),
            "completion_ids": torch.full((num_rows, width), self.pad_token_id),
            "completion_mask": torch.zeros((num_rows, width), dtype=torch.long),
            "sampling_per_token_logps": torch.zeros((num_rows, width)),
        }
        for i, (prompt, completion, logprobs, counts) in enumerate(rows):
            batch["prompt_ids"][i, prompt_width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            batch["prompt_mask"][i, prompt_width - len(prompt) :] = 1
            batch["completion_ids"][i, : len(completion)] = torch.from_numpy(completion.astype(np.int64))
            batch["completion_mask"][i, : len(completion)] = int(counts)
            batch["sampling_per_token_logps"][i, : len(completion)] = torch.from_numpy(logprobs.copy())
        return batch
