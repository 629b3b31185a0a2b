"""Checkpoints: TRL's own folders plus the pipeline state.

Guarantee: a checkpoint counts only once `pipeline_state.json` stands in its folder, which is written last and appears
atomically; what `latest` returns can always be resumed from.
"""

import json
import os
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

_STATE_FILE = "pipeline_state.json"


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


def latest(checkpoints_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that counts and its pipeline state; None if there is none."""
    complete = [folder for folder in checkpoints_dir.glob("checkpoint-*") if (folder / _STATE_FILE).is_file()]
    if not complete:
        return None
    newest = max(complete, key=lambda folder: int(folder.name.rpartition("-")[2]))
    return newest, json.loads((newest / _STATE_FILE).read_text(encoding="utf-8"))


def starting_point(checkpoints_dir: Path, resume: bool) -> tuple[Path, dict[str, Any]] | None:
    """Where a run starts: the newest checkpoint with `--resume`, else from scratch.

    Raises:
        ConfigError: there is a run to go on with, and nobody said to go on with it.
    """
    found = latest(checkpoints_dir)
    if found is not None and not resume:
        raise ConfigError(
            f"run_dir: {checkpoints_dir.parent} already holds a run ({found[0].name}). Go on with it by --resume, or "
            "choose another run_dir"
        )
    return found
