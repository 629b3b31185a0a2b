"""Makes the micro-batches of an optimizer step from rollout groups: advantages, tensors, passes.

Guarantee: a step is split into micro-batches of bounded size, by the tokens that go through the model. Every micro-batch is
padded to its own longest prompt and completion and to nothing else. Its log-probs stand beside the tokens they were sampled
with. Tokens that the policy did not sample are attended to and have no part in its losses. A reference answer is one more row
behind its prompt, with a loss of its own. Rows that cannot move the policy are left out.
No padding and no importance ratio of a group is kept, so a group can be trained again in any company.

All ranks split a step alike. Under `pipeline.trainer_tokens_per_micro_batch: auto` a step that the journal knows is split as it
was, so that its sums come out bit for bit; any other step within the limit that the run has come to. The log-probs of fixed
policies stay with a row when its batch is split again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.learn.row_splits import Sizes, shares, split_rows
from consumer.learn.tree import Row, shared_beginnings, tree_order
from consumer.ranks.exchange import Ranks
from protocol.config.learning import FIRST_TOKENS
from protocol.errors import DeviceError
from replay.batch_selection import LOSS_PARTS, Answers, LossWeights
from replay.distillation import teacher_advantages, teacher_buckets
from replay.groups import RolloutGroup
from replay.journal.schema import MicroBatchPlan
from replay.rewards import RewardRecipe

logger = logging.getLogger(__name__)

MOST_TOKENS = 131_072  # more makes no pass faster
_FIXED_POLICIES = ("old_per_token_logps", "ref_per_token_logps")

Recorded = Callable[[int], MicroBatchPlan | None]
"""From a step to the newest recorded split of it or of a step before it."""

MicroBatch = dict[str, torch.Tensor]

FILLER = -1
"""The number of a row that fills up a rank without rows."""

UNWEIGHTED = (1.0,) * len(LOSS_PARTS)

_ALIGNED_TO = 8  # bytes, of the widest numbers


def loss_mask(batch: MicroBatch) -> torch.Tensor:
    """Return (B, T), 1 for the sampled tokens in the loss."""
    mask = batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]
    return mask * (1 - batch["answer_mask"]) if "answer_mask" in batch else mask


def scored_mask(batch: MicroBatch) -> torch.Tensor:
    """Return (B, T), 1 for the tokens whose log-probs the loss takes: those of answers too, where there is a gradient."""
    has_answers = "answer_mask" in batch and torch.is_grad_enabled()
    return loss_mask(batch) + batch["answer_mask"] if has_answers else loss_mask(batch)


class Places(NamedTuple):
    """The places of a micro-batch that are in the loss."""

    tokens: torch.Tensor  # (N,), in the flattened (B, T), of the tokens in the loss
    rows: torch.Tensor  # of the rows that have one

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Places":
        """Find the ones of a mask (B, T). On a GPU this waits for it."""
        return cls(mask.flatten().nonzero()[:, 0], mask.any(1).nonzero()[:, 0])


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> MicroBatch:
    """Return the tensors on this device. The others are copied in one transfer, and the host does not wait for it."""
    away = {name: tensor for name, tensor in tensors.items() if tensor.device.type != device.type}
    if not away:
        return dict(tensors)
    data, layout = joined_bytes(away)
    there = (data.pin_memory() if device.type == "cuda" else data).to(device, non_blocking=True)
    return dict(tensors) | {name: view_of(there, away[name], place) for name, place in layout.items()}


def joined_bytes(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, int]]:
    """Return their bytes one behind the other, and the start of each, aligned for numbers of any type."""
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    pieces = [torch.nn.functional.pad(piece, (0, -len(piece) % _ALIGNED_TO)) for piece in pieces]
    starts = accumulate((len(piece) for piece in pieces), initial=0)
    return torch.cat(pieces), dict(zip(tensors, starts, strict=False))


def view_of(data: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Return the tensor of this shape and type whose bytes begin there."""
    return data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Row(NamedTuple):
    """A record of a completion, or an answer."""

    number: int  # in the batch
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    advantage: float | NDArray[np.float64]  # of the completion, or of each token
    in_loss: bool  # in the loss
    sampled: NDArray[np.bool_] | None  # None: all of it
    by_teacher: NDArray[np.float64] | None  # of each token; None: there are no teachers
    weights: tuple[float, ...] = UNWEIGHTED  # of LOSS_PARTS
    is_answer: bool = False
    buckets: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None  # of a teacher, whose divergence teaches

    @property
    def tokens(self) -> Row:
        return Row(self.prompt_ids, self.completion_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.completion_ids) if self.sampled is None else int(self.sampled.sum())


@dataclass(frozen=True)
class BatchRecipe:
    """The rules by which groups become tensors, fixed for a run."""

    rewards: RewardRecipe
    num_generations: int
    groups_per_step: int  # of a full step
    max_tokens: int  # of a micro-batch
    tree: bool  # common beginnings of rows go through the model once; if not, rows are padded
    only_advantages: bool  # without advantage a row has no gradient
    keeps_all_rows: bool  # each has one, because the experts' load-balancing loss is a mean over all tokens
    pad_token_id: int
    mask_truncated: bool
    seed: int
    rank: int = 0
    world: int = 1  # number of ranks; each trains its share of the step
    in_step: bool = False  # all of them with as many micro-batches

    def tensors(
        self,
        groups: list[RolloutGroup],
        answers: Answers = (),
        weights: LossWeights = (),
        *,
        advantages: NDArray[np.float64] | None = None,
        dealt_by: int | None = None,
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches of the optimizer steps over one batch, at least one, on the CPU.

        Args:
            advantages: (N,), of the completions, if they are there already.
            dealt_by: tokens of a micro-batch by which rows are dealt out to the ranks, where it is not `max_tokens`.

        Each has `row` (B,), by which rows are found again in another cut of the batch, `prompt_ids`, `prompt_mask` (left-padded),
        `completion_ids`, `completion_mask` (right-padded), `sampling_per_token_logps`, `advantages` (B,), or (B, T) where spans
        have rewards (`rewards.credit`), and `num_items_in_batch` (tokens in the loss, of the whole step). Where there are tokens
        that the policy did not sample, it has TRL's `tool_mask`, 0 for them. With `distillation` it has `teacher_advantages`
        (B, T), and where a divergence teaches also `teacher_ids` and `teacher_logprobs` (B, T, 1 + k); with answers `answer_mask`
        (B, T), 1 for their tokens, and `num_answer_tokens` of the whole step; with weights `loss_weights` (B, 3), of LOSS_PARTS.
        A step with fewer groups than a full one has `filled_share`, its share of them.
        """
        of_groups = list(weights) or [UNWEIGHTED] * len(groups)
        rows = self._rows(groups, self.rewards.advantages(groups) if advantages is None else advantages, of_groups)
        num_items = torch.tensor(sum(row.num_sampled for row in rows if row.in_loss))
        of_answers = _answer_rows(groups, answers, of_groups, len(rows))
        moving = [row for row in rows + of_answers if self._has_gradient(row)]
        shortest = min(rows, key=lambda row: row.tokens.num_tokens)
        moving = moving or [shortest]
        if self.tree:
            moving = [moving[i] for i in tree_order([row.tokens for row in moving])]
        of_ranks = self._deal(moving, dealt_by or self.max_tokens)
        parts = self._passes(of_ranks[self.rank])
        num_parts = max(len(self._passes(rows)) for rows in of_ranks) if self.in_step else 1
        filler = [shortest._replace(number=FILLER, advantage=0.0, in_loss=False)]
        parts += [filler] * (num_parts - len(parts))
        counts = {"num_items_in_batch": num_items}
        if len(groups) < self.groups_per_step:
            counts["filled_share"] = torch.tensor(len(groups) / self.groups_per_step)
        if answers:
            counts["num_answer_tokens"] = torch.tensor(sum(len(row.completion_ids) for row in of_answers))
        return [self._pad(part, bool(answers), bool(weights)) | counts for part in parts]

    def _deal(self, rows: list[_Row], max_tokens: int) -> list[list[_Row]]:
        """Return the rows of each rank; some may have none."""
        if self.world == 1:
            return [rows]
        dealt = shares(self._sizes(rows), max_tokens, world=self.world)
        return [[rows[i] for i in own] for own in dealt]

    def _passes(self, rows: list[_Row]) -> list[list[_Row]]:
        """Return the rows of each micro-batch of one rank."""
        return [[rows[i] for i in part] for part in split_rows(self._sizes(rows), self.max_tokens)]

    def _sizes(self, rows: list[_Row]) -> Sizes:
        tokens = [row.tokens for row in rows]
        return Sizes([row.num_tokens for row in tokens], shared_beginnings(tokens) if self.tree else None)

    def _has_gradient(self, row: _Row) -> bool:
        if self.keeps_all_rows:
            return True
        of_rewards, of_teacher, of_answer = row.weights
        if row.is_answer:
            return of_answer != 0.0
        by_teacher = (row.by_teacher is not None and np.any(row.by_teacher)) or row.buckets
        moves = bool(of_rewards and np.any(row.advantage)) or bool(of_teacher and by_teacher)
        return row.in_loss and (moves or not self.only_advantages)

    def _rows(self, groups: list[RolloutGroup], advantages: NDArray[np.float64], weights: LossWeights) -> list[_Row]:
        credit, result = self.rewards.credit, list[_Row]()
        for of_group, group, of_loss in zip(np.split(advantages, len(groups)), groups, weights, strict=True):
            own = of_group.tolist() if credit is None else credit.advantages(group, of_group)
            taught = None if self.rewards.distillation is None else teacher_advantages(group)
            buckets = teacher_buckets(group) if self.rewards.num_top else None
            for tokens, completion, cut in zip(group.records, group.completion_of, group.truncated, strict=True):
                completion_ids, logprobs = group.completion_ids[tokens], group.logprobs[tokens]
                sampled = None if group.sampled is None else group.sampled[tokens]
                in_loss = not (cut and self.mask_truncated)
                advantage = own[completion if credit is None else tokens]
                by_teacher = None if taught is None else taught[tokens]
                of_row = None if buckets is None else (buckets[0][tokens], buckets[1][tokens])
                row = (len(result), group.prompt_ids, completion_ids, logprobs, advantage, in_loss, sampled, by_teacher)
                result.append(_Row(*row, weights=of_loss, buckets=of_row))
        return result

    def _pad(self, rows: list[_Row], has_answers: bool, has_weights: bool) -> MicroBatch:
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
        if self.rewards.credit is not None:
            batch["advantages"] = np.zeros((num_rows, width))
        if self.rewards.distillation is not None:
            batch["teacher_advantages"] = np.zeros((num_rows, width))
        if has_answers:
            batch["answer_mask"] = np.zeros((num_rows, width), np.int64)
        if has_weights:
            batch["loss_weights"] = np.array([row.weights for row in rows])
        if num_top := self.rewards.num_top:
            batch["teacher_ids"] = np.zeros((num_rows, width, 1 + num_top), np.int32)
            batch["teacher_logprobs"] = np.zeros((num_rows, width, 1 + num_top))
        if any(row.sampled is not None for row in rows):
            batch["tool_mask"] = np.ones((num_rows, width), np.int64)
        for i, row in enumerate(rows):
            start, end = prompt_width - len(row.prompt_ids), len(row.completion_ids)
            batch["prompt_ids"][i, start:] = row.prompt_ids
            batch["prompt_mask"][i, start:] = 1
            batch["completion_ids"][i, :end] = row.completion_ids
            batch["completion_mask"][i, :end] = row.in_loss or row.is_answer
            batch["sampling_per_token_logps"][i, :end] = row.logprobs
            if has_answers:
                batch["answer_mask"][i, :end] = row.is_answer
            if row.sampled is not None:
                batch["tool_mask"][i, :end] = row.sampled
            if self.rewards.credit is not None:
                batch["advantages"][i, :end] = row.advantage
            if row.by_teacher is not None:
                batch["teacher_advantages"][i, :end] = row.by_teacher
            if row.buckets is not None:
                batch["teacher_ids"][i, :end], batch["teacher_logprobs"][i, :end] = row.buckets
        if self.rewards.credit is None:
            batch["advantages"] = np.array([row.advantage for row in rows])
        real = torch.get_default_dtype()
        tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        return {name: each.to(real) if each.is_floating_point() else each for name, each in tensors.items()}


def _answer_rows(groups: list[RolloutGroup], answers: Answers, weights: LossWeights, first: int) -> list[_Row]:
    """Return the rows of the answers that there are.

    Args:
        first: the number of the first group's.
    """
    numbered = enumerate(zip(groups, answers, weights, strict=True), first) if answers else ()
    return [
        _Row(
            number,
            group.prompt_ids,
            ids,
            np.zeros(len(ids), np.float32),
            0.0,
            False,
            None,
            None,
            of_group,
            is_answer=True,
        )
        for number, (group, ids, of_group) in numbered
        if ids is not None
    ]


class CompletionTooLargeError(DeviceError):
    """A completion with its prompt needs more memory than the device has, so that its batch may never be trained."""


@dataclass(eq=False)
class StepSplitter:
    """Splits each step over a batch into micro-batches. All ranks call every method.

    Args:
        setting: tokens of a pass, or `auto`.
        recorded: asked on rank 0 alone.

    Attributes:
        tokens: that a pass of the step in progress may have, padding included, shared beginnings counted once; one row may
            have more.
        micro_batches: this rank's, of that step.
        random_state: of the device, with which that step began when it was recorded; None: it was not, or draws no numbers.
    """

    setting: int | Literal["auto"]
    ranks: Ranks
    recorded: Recorded
    micro_batches: list[MicroBatch] = field(default_factory=list)
    random_state: bytes | None = None

    def __post_init__(self) -> None:
        self.tokens = FIRST_TOKENS if self.setting == "auto" else self.setting
        self._is_under_way = False
        self._kept: Sequence[MicroBatch] = ()  # of the step before over the same batch
        self._recipe: BatchRecipe
        self.advantages: NDArray[np.float64] = np.empty(0)  # of the completions of the batch
        self._batch: tuple[list[RolloutGroup], Answers, LossWeights]
        self._dealt_by: int  # tokens of a pass when the rows were dealt out to the ranks

    def begin(
        self, recipe: BatchRecipe, groups: list[RolloutGroup], answers: Answers = (), weights: LossWeights = ()
    ) -> None:
        """Take up the next batch."""
        self._recipe, self._batch, self.micro_batches = recipe, (groups, answers, weights), []
        self.advantages = recipe.rewards.advantages(groups)

    def split(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of optimizer step `step`, counted from 1, over the batch."""
        self._kept = self.micro_batches
        before, self.tokens = self.tokens, self._tokens_of(step)
        if not self._kept or self.tokens != before:
            self._split()
        return self.micro_batches

    def forget(self) -> None:
        """Drop the tensors of the last batch, also from micro-batches that others hold."""
        for batch in self.micro_batches:
            batch.clear()
        self.micro_batches.clear()

    def halve(self, problem: str) -> list[MicroBatch]:
        """Return the step in progress in more passes than before, of at most half as many tokens.

        Args:
            problem: the device's words about the passes as they were.

        Raises:
            DeviceError: the number of tokens is fixed.
            CompletionTooLargeError: rows that go alone are too large.
        """
        if self.setting != "auto":
            raise DeviceError(
                f"the trainer's device has no memory for a pass of {self.tokens} tokens ({problem}); lower "
                "pipeline.trainer_tokens_per_micro_batch or leave it to auto, then go on with --resume"
            )
        before, num_passes = self.tokens, self._num_passes()
        while self._num_passes() == num_passes:
            if self.tokens == 1:
                raise CompletionTooLargeError(
                    f"the trainer's device has no memory for a single completion with its prompt ({problem}); remove "
                    "trainer.gradient_checkpointing if it is false, lower sampling.max_completion_length, or take a device with "
                    "more memory"
                )
            self.tokens //= 2
            self._split()
        text = "the device is out of memory with passes of %d tokens; the step is split again into passes of %d (%s)"
        logger.warning(text, before, self.tokens, problem)
        return self.micro_batches

    def measured(self, fitting: int | None) -> None:
        """Take over the limit that was measured, once in a run.

        Args:
            fitting: tokens of the largest pass that this rank's device has room for; None: it cannot tell.
        """
        if self.setting != "auto" or self.tokens != FIRST_TOKENS:
            return
        found = self.ranks.gather({"fitting": torch.tensor([fitting or MOST_TOKENS + 1])})["fitting"]
        least = int(found.min())
        if least <= MOST_TOKENS:
            self.tokens = least
            logger.info("measured: the device has room for passes of %d tokens", least)

    def _tokens_of(self, step: int) -> int:
        if self.setting != "auto":
            return self.setting
        newest = self.recorded(step) if self.ranks.rank == 0 else None
        own = newest if newest is not None and newest.step == step else None
        self.random_state = own.random_state if own is not None else None
        found = own if self._is_under_way else newest
        self._is_under_way = True
        tokens = found.tokens if found is not None else self.tokens
        return int(self.ranks.gather({"tokens": torch.tensor([tokens])})["tokens"][0])

    def _split(self) -> None:
        if not self._kept:
            self._dealt_by = self.tokens
        recipe = replace(self._recipe, max_tokens=self.tokens)
        self.micro_batches = recipe.tensors(*self._batch, advantages=self.advantages, dealt_by=self._dealt_by)
        if self._kept:
            carry_over(self._kept, self.micro_batches)

    def _num_passes(self) -> int:
        return int(self.ranks.gather({"passes": torch.tensor([len(self.micro_batches)])})["passes"].sum())


def carry_over(before: Sequence[MicroBatch], after: Sequence[MicroBatch]) -> None:
    """Give the rows of a new split the log-probs of fixed policies that they had in the one before."""
    for name in _FIXED_POLICIES:
        if name not in before[0]:
            continue
        known = {int(row): values for batch in before for row, values in zip(batch["row"], batch[name], strict=True)}
        for batch in after:
            width = batch["completion_ids"].size(1)
            rows = [known[int(row)] if row != FILLER else before[0][name].new_zeros(0) for row in batch["row"]]
            batch[name] = torch.stack(
                [torch.nn.functional.pad(row[:width], (0, max(0, width - len(row)))) for row in rows]
            )
