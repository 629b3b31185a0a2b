"""What rank 0 tells the others, in time.

Guarantee: the others hear of a run before any of its batches, and of every batch before rank 0 trains it.
"""

from collections.abc import Iterable, Iterator

from consumer.checkpoints.folders import Checkpoint
from consumer.ranks.exchange import Ranks
from consumer.ranks.plan import Begin, Train
from replay.batches.cutting import CutBatch


class LedBatches:
    """The batches of rank 0."""

    def __init__(self, batches: Iterable[CutBatch], ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks

    def __iter__(self) -> Iterator[CutBatch]:
        for batch in self._batches:
            if self._ranks.world > 1:
                self._ranks.share(Train.of(batch))
            yield batch


def begin(num_prompts: int, vocab_size: int, checkpoint: Checkpoint | None) -> Begin:
    """
    Args:
        checkpoint: that the run goes on from.
    """
    if checkpoint is None:
        return Begin(num_prompts, vocab_size, 0, {})
    files = {file.name: file.read_bytes() for file in checkpoint.folder.iterdir() if file.is_file()}
    return Begin(num_prompts, vocab_size, checkpoint.step, files)
