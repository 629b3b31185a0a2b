"""Keeps the log-probs of the proximal policy where a run ends between two iterations over a batch (`trainer.max_steps`).

Guarantee: when --resume makes the run longer, the iterations that are left have the proximal policy of the first one. So the run
is the one that it would have been without the end.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from consumer.learn.micro_batches import FILLER, MicroBatch
from consumer.ranks.exchange import Ranks

_NAME, _FILE = "old_per_token_logps", "cut_batch.safetensors"


class CutBatch:
    """The log-probs of the rows of one batch, on the CPU; empty where no batch was cut."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._of_row: dict[int, torch.Tensor] = {}

    def keep(self, batches: Sequence[MicroBatch]) -> None:
        """Take the log-probs from the micro-batches of all ranks. All ranks call it."""
        rows = torch.cat([batch["row"] for batch in batches])
        widths = torch.cat([torch.full_like(batch["row"], batch[_NAME].size(1)) for batch in batches])
        values = torch.cat([batch[_NAME].flatten().cpu() for batch in batches])
        found = self._ranks.gather({"rows": rows, "widths": widths, "values": values})
        parts = found["values"].to(values.dtype).split(found["widths"].long().tolist())
        self._of_row = dict(zip(found["rows"].long().tolist(), parts, strict=True))

    def give_to(self, batches: Sequence[MicroBatch]) -> None:
        """Give the log-probs that were loaded to the micro-batches of the batch that was cut, once."""
        of_row, self._of_row = self._of_row, {}
        for batch in batches if of_row else ():
            width = batch["completion_ids"].size(1)
            rows = [of_row[row] if row != FILLER else torch.zeros(0) for row in batch["row"].tolist()]
            batch[_NAME] = torch.stack(
                [torch.nn.functional.pad(row[:width], (0, max(0, width - len(row)))) for row in rows]
            )

    def save(self, folder: Path) -> None:
        """Write them beside a checkpoint."""
        if self._of_row:
            save_file({str(row): values.clone() for row, values in self._of_row.items()}, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Read what is beside a checkpoint."""
        if (folder / _FILE).is_file():
            self._of_row = {int(row): values for row, values in load_file(folder / _FILE).items()}
