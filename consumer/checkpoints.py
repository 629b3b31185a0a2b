"""Checkpoints: TRL's own folders plus the pipeline state.

Guarantee: a checkpoint counts only once `pipeline_state.json` stands in its folder, which is written last and appears
atomically; what `latest` returns can always be resumed from.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError

_STATE_FILE = "pipeline_state.json"


class Checkpoint(NamedTuple):
    """A checkpoint that counts: its folder and the pipeline state in it."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.state["step"])

    @property
    def run_id(self) -> str:
        return str(self.state["run_id"])


def commit(folder: Path, state: dict[str, Any]) -> None:
    """Writes the pipeline state into a checkpoint folder, which makes the checkpoint count."""
    partial = folder / f"{_STATE_FILE}.partial"
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(folder / _STATE_FILE)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_committed(folder: Path) -> bool:
    return (folder / _STATE_FILE).is_file()


def prune(checkpoints_dir: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints that count. Each stops counting before its files go."""
    for folder in _committed(checkpoints_dir)[:-keep]:
        (folder / _STATE_FILE).unlink()
        shutil.rmtree(folder)


def latest(checkpoints_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that counts; None if there is none."""
    committed = _committed(checkpoints_dir)
    if not committed:
        return None
    return Checkpoint(committed[-1], json.loads((committed[-1] / _STATE_FILE).read_text(encoding="utf-8")))


def starting_point(checkpoints_dir: Path, resume: bool) -> Checkpoint | None:
    """Where a run starts: the newest checkpoint with `--resume`, else from scratch.

    Raises:
        ConfigError: there is a run to go on with, and nobody said to go on with it.
    """
    found = latest(checkpoints_dir)
    if found is not None and not resume:
        raise ConfigError(
            f"run_dir: {checkpoints_dir.parent} already holds a run ({found.folder.name}). Go on with it by --resume, or "
            "choose another run_dir"
        )
    return found


def _committed(checkpoints_dir: Path) -> list[Path]:
    """The checkpoints that count, oldest first."""
    steps = {
        int(folder.name.removeprefix("checkpoint-")): folder
        for folder in checkpoints_dir.glob("checkpoint-*")
        if folder.name.removeprefix("checkpoint-").isdigit() and is_committed(folder)
    }
    return [steps[step] for step in sorted(steps)]
