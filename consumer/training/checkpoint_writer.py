"""Checkpoints of a run in progress.

Guarantee: a checkpoint is committed only together with the pipeline state that belongs to it, as soon as the disk has room for
both; older ones go after that, and then what only they needed.
"""

from collections.abc import Callable
from pathlib import Path

from consumer.checkpoints import folders as checkpoints
from consumer.training.pipeline import Pipeline
from consumer.waiting import Patience, write_when_there_is_room


class CheckpointWriter:
    """See the module's guarantee.

    Args:
        folder: of all checkpoints.
        keep: this many of the newest; None: all.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, patience: Patience, run_id: str, keep: int | None) -> None:
        self._folder = folder
        self._pipeline = pipeline
        self._patience = patience
        self._run_id = run_id
        self._keep = keep

    def commit(self, step: int, staged: Path, write: Callable[[], None]) -> None:
        """Commits a checkpoint of this moment, after optimizer step `step`.

        Args:
            write: puts the part that transformers writes into `staged`.
        """
        state = self._pipeline.state() | {"step": step, "run_id": self._run_id}

        def whole() -> None:
            checkpoints.clear_leftovers(self._folder)
            try:
                write()
                checkpoints.commit(staged, state)
            except BaseException:
                checkpoints.clear_leftovers(self._folder)
                raise

        write_when_there_is_room(whole, self._patience, self._folder, "a checkpoint")
        if self._keep:
            checkpoints.prune(self._folder, self._keep)
        self._pipeline.checkpointed(self._folder)
