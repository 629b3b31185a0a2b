"""Rollout groups to the tensors that TRL's loss takes.

Guarantee: a step is cut into micro-batches of bounded size by the lengths of its rows; every micro-batch is padded to its own
longest prompt and completion and to nothing else, and its log-probs stand beside the tokens they were sampled with. Tokens that
the policy did not sample are attended to and never in the loss. Rows that cannot move the policy are left out. What a group was
padded to before, and any importance ratio it had, is nowhere kept, so a group can be trained again in any company.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.batches.advantages import advantages
from consumer.batches.balance import shares
from consumer.batches.micro_batches import cut_rows
from replay.groups import RolloutGroup
from replay.rewards import RewardRecipe

MicroBatch = dict[str, torch.Tensor]

FILLER = -1
"""The number of a row that stands for none."""

_ALIGNED_TO = 8  # bytes, of the widest numbers


def loss_mask(batch: MicroBatch) -> torch.Tensor:
    """(B, T), 1 for the tokens in the loss."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


class Places(NamedTuple):
    """Where the loss of a micro-batch is."""

    tokens: torch.Tensor  # (N,), in the flattened (B, T), of the tokens in the loss
    rows: torch.Tensor  # of the rows that have one

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Places":
        """Of the ones of a mask (B, T). On a GPU this waits for it."""
        return cls(mask.flatten().nonzero()[:, 0], mask.any(1).nonzero()[:, 0])


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> MicroBatch:
    """The tensors on this device. What is not there is copied in one transfer, which the host does not wait for."""
    away = {name: tensor for name, tensor in tensors.items() if tensor.device.type != device.type}
    if not away:
        return dict(tensors)
    data, layout = joined_bytes(away)
    there = (data.pin_memory() if device.type == "cuda" else data).to(device, non_blocking=True)
    return dict(tensors) | {name: view_of(there, away[name], place) for name, place in layout.items()}


def joined_bytes(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, int]]:
    """Their bytes one behind the other, and where each begins, so that numbers of any type may begin there."""
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    pieces = [torch.nn.functional.pad(piece, (0, -len(piece) % _ALIGNED_TO)) for piece in pieces]
    starts = accumulate((len(piece) for piece in pieces), initial=0)
    return torch.cat(pieces), dict(zip(tensors, starts, strict=False))


def view_of(data: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """The tensor of this shape and type whose bytes begin there."""
    return data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Row(NamedTuple):
    """One record of a completion."""

    number: int  # in the batch
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    advantage: float  # of the completion
    in_loss: bool  # in the loss
    sampled: NDArray[np.bool_] | None  # None: all of it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.completion_ids) if self.sampled is None else int(self.sampled.sum())


@dataclass(frozen=True)
class BatchRecipe:
    """What turns groups into tensors, fixed for a run."""

    rewards: RewardRecipe
    num_generations: int
    max_tokens: int  # of a micro-batch
    packed: bool  # rows stand one behind the other, without padding
    only_advantages: bool  # without advantage a row has no gradient
    keeps_all_rows: bool  # each has one, because the experts' load-balancing loss is a mean over all tokens
    pad_token_id: int
    scale_rewards: str
    baseline: str
    mask_truncated: bool
    seed: int
    rank: int = 0
    world: int = 1  # number of ranks, each of which trains its share of the step
    in_step: bool = False  # all of them with as many micro-batches

    def tensors(self, groups: list[RolloutGroup], dealt_by: int | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of the optimizer steps over one batch, at least one, on the CPU.

        Args:
            dealt_by: tokens of a micro-batch by which rows are dealt out to the ranks, where it is not `max_tokens`.

        Each has `row` (B,), by which rows are found again in another cut of the batch, `prompt_ids`, `prompt_mask` (left-padded),
        `completion_ids`, `completion_mask` (right-padded), `sampling_per_token_logps`, `advantages` (B,) and `num_items_in_batch`
        (tokens in the loss, of the whole step); and, where there are tokens that the policy did not sample, TRL's `tool_mask`,
        which is 0 for them.
        """
        rows = self._rows(groups)
        num_items = torch.tensor(sum(row.num_sampled for row in rows if row.in_loss))
        moving = [row for row in rows if self._moves(row)]
        shortest = min(rows, key=lambda row: row.num_tokens)
        of_ranks = self._deal(moving or [shortest], dealt_by or self.max_tokens)
        parts = self._cut(of_ranks[self.rank])
        num_parts = max(len(self._cut(rows)) for rows in of_ranks) if self.in_step else 1
        filler = [shortest._replace(number=FILLER, advantage=0.0, in_loss=False)]
        parts += [filler] * (num_parts - len(parts))
        return [self._pad(part) | {"num_items_in_batch": num_items} for part in parts]

    def _deal(self, rows: list[_Row], max_tokens: int) -> list[list[_Row]]:
        """The rows of each rank; some may have none."""
        if self.world == 1:
            return [rows]
        lengths = [row.num_tokens for row in rows]
        dealt = shares(lengths, max_tokens, padded=not self.packed, world=self.world)
        return [[rows[i] for i in own] for own in dealt]

    def _cut(self, rows: list[_Row]) -> list[list[_Row]]:
        """The micro-batches of one rank."""
        cut = cut_rows([row.num_tokens for row in rows], self.max_tokens, padded=not self.packed)
        return [[rows[i] for i in part] for part in cut]

    def _moves(self, row: _Row) -> bool:
        if self.keeps_all_rows:
            return True
        return row.in_loss and (bool(row.advantage) or not self.only_advantages)

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

    def _rows(self, groups: list[RolloutGroup]) -> list[_Row]:
        values = self.advantages_of(groups).tolist()
        result = list[_Row]()
        for first, group in zip(range(0, len(values), self.num_generations), groups, strict=True):
            for tokens, completion, cut in zip(group.records, group.completion_of, group.truncated, strict=True):
                completion_ids, logprobs = group.completion_ids[tokens], group.logprobs[tokens]
                sampled = None if group.sampled is None else group.sampled[tokens]
                in_loss = not (cut and self.mask_truncated)
                advantage = values[first + completion]
                result.append(
                    _Row(len(result), group.prompt_ids, completion_ids, logprobs, advantage, in_loss, sampled)
                )
        return result

    def _pad(self, rows: list[_Row]) -> MicroBatch:
        num_rows = len(rows)
        prompt_width = max(len(row.prompt_ids) for row in rows)
        width = max(len(row.completion_ids) for row in rows)
        batch: dict[str, NDArray[Any]] = {
            "row": np.array([row.number for row in rows]),
            "prompt_ids": np.full((num_rows, prompt_width), self.pad_token_id),
            "prompt_mask": np.zeros((num_rows, prompt_width), np.int64),
            "completion_ids": np.full((num_rows, width), self.pad_token_id),
            "completion_mask": np.zeros((num_rows, width), np.int64),
            "sampling_per_token_logps": np.zeros((num_rows, width)),
        }
        if any(row.sampled is not None for row in rows):
            batch["tool_mask"] = np.ones((num_rows, width), np.int64)
        for i, row in enumerate(rows):
            start, end = prompt_width - len(row.prompt_ids), len(row.completion_ids)
            batch["prompt_ids"][i, start:] = row.prompt_ids
            batch["prompt_mask"][i, start:] = 1
            batch["completion_ids"][i, :end] = row.completion_ids
            batch["completion_mask"][i, :end] = row.in_loss
            batch["sampling_per_token_logps"][i, :end] = row.logprobs
            if row.sampled is not None:
                batch["tool_mask"][i, :end] = row.sampled
        tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        tensors["advantages"] = torch.tensor([row.advantage for row in rows])
        logprobs = tensors["sampling_per_token_logps"].to(tensors["advantages"].dtype)  # torch's default
        return tensors | {"sampling_per_token_logps": logprobs}
