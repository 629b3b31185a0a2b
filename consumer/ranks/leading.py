"""What rank 0 tells the others, in time.

Guarantee: the others hear of a run before any of its batches, and of every batch before rank 0 trains it.
"""

from collections.abc import Iterable, Iterator

from consumer.checkpoints.folders import Checkpoint
from consumer.ranks.exchange import Ranks
from consumer.ranks.plan import PIECE_BYTES, Begin, Piece, Train
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


def begin(ranks: Ranks, num_prompts: int, vocab_size: int, checkpoint: Checkpoint | None) -> None:
    """
    Args:
        checkpoint: that the run goes on from.
    """
    files = [file for file in checkpoint.folder.iterdir() if file.is_file()] if checkpoint else []
    sizes = {file.name: file.stat().st_size for file in files}
    ranks.share(Begin(num_prompts, vocab_size, checkpoint.step if checkpoint else 0, sizes))
    for file in files:
        with file.open("rb") as stream:
            while data := stream.read(PIECE_BYTES):
                ranks.share(Piece(data))
