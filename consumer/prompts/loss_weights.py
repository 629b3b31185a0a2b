"""Reads how much each part of the loss counts for the prompts of a batch: `loss.weights_column`.

Guarantee: equal rows give equal weights, at every start and in a run that is trained again. The first row of each source has
usable ones. A later row without has 0 for all parts, so that it trains nothing; the log names the first such row.
"""

import logging
import math
from typing import Any

from consumer.prompts.dataset import Placeholders, PromptDataset
from protocol.errors import DatasetError
from replay.batch_selection import LOSS_PARTS, TrainingBatch

logger = logging.getLogger(__name__)

Weights = tuple[float, ...]
"""In the order of LOSS_PARTS."""


class LossWeights:
    """The weights in `column` of the rows. Raises DatasetError if the first row of a source has no such column, or no usable
    weights."""

    def __init__(self, column: str, prompts: PromptDataset | Placeholders) -> None:
        self._column, self._prompts = column, prompts
        self._has_warned = False
        for prompt_id in prompts.first_of_sources():
            self._read(prompt_id)

    def add_to(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with the weights of its groups' rows."""
        return batch._replace(weights=[self.of(group.lease.key.prompt_id) for group in batch.groups])

    def of(self, prompt_id: int) -> Weights:
        """Return the weights of a prompt: 0 for all parts, which the log explains, if its row has no usable ones."""
        try:
            return self._read(prompt_id)
        except DatasetError as error:
            if not self._has_warned:
                logger.warning("%s. Nothing is trained by this row, nor by others like it", error)
            self._has_warned = True
            return (0.0,) * len(LOSS_PARTS)

    def _read(self, prompt_id: int) -> Weights:
        _, columns = self._prompts[prompt_id]
        place = self._prompts.place(prompt_id)
        if self._column not in columns:
            raise DatasetError(
                f"loss.weights_column: {place} has no column {self._column!r}; it has {', '.join(map(repr, columns))}"
            )
        try:
            return weights_of(columns[self._column])
        except ValueError as error:
            raise DatasetError(f"loss.weights_column: {place}: {self._column!r} {error}") from None


def weights_of(value: Any) -> Weights:
    """Return the weights that a mapping of parts to numbers gives. A part without one, and null in place of any, count 1. Raises
    ValueError."""
    given = {} if value is None else value
    if not isinstance(given, dict) or not set(given) <= set(LOSS_PARTS):
        raise ValueError(f"must be null or a mapping with the keys {', '.join(LOSS_PARTS)}, got {value!r:.80}")
    weights = [1.0 if given.get(part) is None else given[part] for part in LOSS_PARTS]
    for part, weight in zip(LOSS_PARTS, weights, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"must give {part} a number that is finite and not negative, got {weight!r:.80}")
    return tuple(map(float, weights))
