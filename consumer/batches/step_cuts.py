"""How many tokens a pass of the trainer may have, step by step (`pipeline.trainer_tokens_per_micro_batch`).

Guarantee: all ranks cut a step alike. Under `auto` a step that the journal knows is cut as it was, so that its sums come out bit
for bit; any other step within what the run has come to. What fixed policies said of a row in an earlier step over its batch stays
with the row when the batch is cut again.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from consumer.batches.tensors import FILLER, BatchRecipe, MicroBatch
from consumer.ranks.exchange import Ranks
from protocol.config.learning import FIRST_TOKENS
from protocol.errors import DeviceError
from replay.batches.cutting import CutBatch
from replay.groups import RolloutGroup
from replay.journal.tables import StepCut

logger = logging.getLogger(__name__)

MOST_TOKENS = 131_072  # more makes no pass faster
_FIXED_POLICIES = ("old_per_token_logps", "ref_per_token_logps")

Recorded = Callable[[int], StepCut | None]
"""From a step to the newest recorded cut of it or of a step before it."""


class CompletionTooLargeError(DeviceError):
    """A completion with its prompt needs more memory than the device has, so that its batch may never be trained."""


@dataclass(eq=False)
class StepCutter:
    """See the module's guarantee. Every method is called by all ranks.

    Args:
        setting: tokens of a pass, or `auto`.
        recorded: asked on rank 0 alone.

    Attributes:
        tokens: that a pass of the step in progress may have, padding included; one row may have more.
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
        self._groups: list[RolloutGroup]
        self._dealt_by: int  # tokens of a pass when the rows were dealt out to the ranks

    def steps(self, recipe: BatchRecipe, batch: CutBatch) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each optimizer step over the batch."""
        self._recipe, self._groups, self._kept = recipe, batch.groups, ()
        for step in range(batch.last_step - batch.num_iterations + 1, batch.last_step + 1):
            before, self.tokens = self.tokens, self._tokens_of(step)
            if not self._kept or self.tokens != before:
                self._cut()
            yield self.micro_batches
            self._kept = self.micro_batches

    def forget(self) -> None:
        """Drop the tensors of the last batch, whoever holds its micro-batches."""
        for batch in self.micro_batches:
            batch.clear()
        self.micro_batches.clear()

    def halve(self, problem: str) -> list[MicroBatch]:
        """The step in progress in more passes than before, of at most half as many tokens.

        Args:
            problem: what the device said of the passes as they were.

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
                    f"the trainer's device has no memory for a single completion with its prompt ({problem}); set "
                    "trainer.gradient_checkpointing=true, lower sampling.max_completion_length, or take a device with more memory"
                )
            self.tokens //= 2
            self._cut()
        text = "the device is out of memory with passes of %d tokens; the step is cut again into passes of %d (%s)"
        logger.warning(text, before, self.tokens, problem)
        return self.micro_batches

    def measured(self, fitting: int | None) -> None:
        """Takes over what was measured, once in a run.

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

    def _cut(self) -> None:
        if not self._kept:
            self._dealt_by = self.tokens
        recipe = replace(self._recipe, max_tokens=self.tokens)
        self.micro_batches = recipe.tensors(self._groups, dealt_by=self._dealt_by)
        if self._kept:
            carry_over(self._kept, self.micro_batches)

    def _num_passes(self) -> int:
        return int(self.ranks.gather({"passes": torch.tensor([len(self.micro_batches)])})["passes"].sum())


def carry_over(before: Sequence[MicroBatch], after: Sequence[MicroBatch]) -> None:
    """Gives the rows of a new cut the log-probs of fixed policies that they had in the one before."""
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
