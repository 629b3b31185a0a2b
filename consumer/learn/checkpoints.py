"""Checkpoints: TRL's own folders plus the pipeline state.

Guarantee: a checkpoint is written under `checkpoints/.partial`, brought to the disk, and then appears under its own name
in one rename. The checkpoint that `latest` returns is whole and can be resumed from, whenever the machine went down. An old one
is renamed into `checkpoints/.deleted` before its files go. The next process removes the leftovers of a crash from these two
folders. A folder that no run of Slipstream committed is refused, never deleted or replaced.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError
from protocol.runtime.files import ignore_disk_full, settle, staged, sync
from protocol.wire.model_check import checkpoint_problems

KEPT_FOLDER = "adapters"
_OF_ADAPTER = "adapter_"  # so begin the names of an adapter's files
CONFIG_FILE = "adapter_config.json"
FINAL_FOLDERS = {"adapter": CONFIG_FILE, "model": "config.json"}
"""The folders of a run's final weights, an adapter or a model, with a file that each has."""

_STATE_FILE = "pipeline_state.json"


class Checkpoint(NamedTuple):
    """A committed checkpoint: its folder and the pipeline state in it."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.state["step"])

    @property
    def run_id(self) -> str:
        return str(self.state["run_id"])


def staging(checkpoints_dir: Path) -> Path:
    """Return the folder where checkpoints are written before they are committed."""
    return checkpoints_dir / ".partial"


def clear_leftovers(checkpoints_dir: Path) -> None:
    """Remove the checkpoints that a crash left half written, or half deleted."""
    for folder in (staging(checkpoints_dir), _deleted(checkpoints_dir)):
        shutil.rmtree(folder, ignore_errors=True)


def commit(staged: Path, state: dict[str, Any]) -> None:
    """Complete the checkpoint in `staging(...)/checkpoint-N` with the pipeline state, and commits it. A checkpoint that is
    committed already stays: it is of the same step, and from the same weights.

    Raises:
        ConfigError: a folder that no run of Slipstream wrote has the name.
    """
    (staged / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    final = staged.parents[1] / staged.name
    if is_committed(final):
        shutil.rmtree(staged)
    elif final.exists():
        raise _foreign(final)
    else:
        settle(staged, final)


def is_committed(folder: Path) -> bool:
    return (folder / _STATE_FILE).is_file()


def prune(checkpoints_dir: Path, keep: int, keep_adapters: int = 0) -> None:
    """Delete all but the newest `keep` checkpoints. They have left their names, on the disk too, when their files go. Of those
    that were deleted, the newest `keep_adapters` adapters stay."""
    old = committed(checkpoints_dir)[:-keep]
    for checkpoint in old[-keep_adapters:] if keep_adapters else ():
        with ignore_disk_full():
            _keep_adapter(checkpoint, checkpoints_dir.parent)
    for _, folder in sorted(kept_adapters(checkpoints_dir.parent).items())[: -keep_adapters or None]:
        shutil.rmtree(folder)
    if old:
        _deleted(checkpoints_dir).mkdir(exist_ok=True)
        for checkpoint in old:
            checkpoint.folder.rename(_deleted(checkpoints_dir) / checkpoint.folder.name)
        sync(checkpoints_dir)
    clear_leftovers(checkpoints_dir)


def _keep_adapter(checkpoint: Checkpoint, run_dir: Path) -> None:
    files = list(checkpoint.folder.glob(f"{_OF_ADAPTER}*"))
    if files:
        with staged(run_dir / KEPT_FOLDER / f"step-{checkpoint.step}") as partial:
            partial.mkdir(parents=True)
            for file in files:
                try:
                    os.link(file, partial / file.name)
                except OSError:  # not every file system has links
                    shutil.copyfile(file, partial / file.name)


def kept_adapters(run_dir: Path) -> dict[int, Path]:
    """Return the folders of the adapters that stayed of deleted checkpoints, by their steps."""
    steps = ((folder.name.removeprefix("step-"), folder) for folder in (run_dir / KEPT_FOLDER).glob("step-*"))
    return {int(step): folder for step, folder in steps if step.isdigit()}


def latest(checkpoints_dir: Path) -> Checkpoint | None:
    """Return the newest committed checkpoint; None if there is none."""
    return next(iter(committed(checkpoints_dir)[::-1]), None)


def newest_adapter(run_dir: Path, checkpoints_dir: Path) -> tuple[Path, int] | None:
    """Return the folder of the newest weights, and the number of their steps: the final ones, unless the run went on after them,
    or the newest checkpoint. None if there is neither."""
    newest, summary = latest(checkpoints_dir), run_dir / "trainer.json"
    final = next((run_dir / name for name, file in FINAL_FOLDERS.items() if (run_dir / name / file).is_file()), None)
    if final is not None and summary.is_file():
        ended = json.loads(summary.read_text(encoding="utf-8"))
        if newest is None or (ended["finished"] and int(ended["steps"]) >= newest.step):
            return final, int(ended["steps"])
    return None if newest is None else (newest.folder, newest.step)


def committed(checkpoints_dir: Path) -> list[Checkpoint]:
    """Return the committed checkpoints, oldest first, without one that `prune` takes away meanwhile."""
    found = []
    for folder in _folders(checkpoints_dir):
        if is_committed(folder):
            with contextlib.suppress(FileNotFoundError):
                found.append(Checkpoint(folder, _state(folder)))
    return found


def _state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
        return state
    except ValueError as error:
        raise _damaged(folder, f"{folder / _STATE_FILE} cannot be read as JSON") from error


def starting_point(run_dir: Path, checkpoints_dir: Path, *, has_groups: bool, resume: bool) -> Checkpoint | None:
    """Return the checkpoint that a run starts from: the newest one with `--resume`; None: from scratch.

    Raises:
        ConfigError: there is a run, as a checkpoint or as groups in the journal, and no `--resume`; or there are checkpoints of
            other programs or runs, whose names this run would need; or the newest one is not whole.
    """
    for folder in _folders(checkpoints_dir):
        if not is_committed(folder):
            raise _foreign(folder)
    found = latest(checkpoints_dir)
    for other in committed(checkpoints_dir):
        if found is not None and other.run_id != found.run_id:
            raise ConfigError(
                f"run_dir: {other.folder} belongs to another run than {found.folder}; move one of them out of {checkpoints_dir}"
            )
    if (found is not None or has_groups) and not resume:
        what = found.folder.name if found is not None else "groups in its journal"
        raise ConfigError(
            f"run_dir: {run_dir} already holds a run ({what}). Go on with it by --resume, or choose another run_dir"
        )
    if found is not None and (problem := next(checkpoint_problems(found.folder), None)):
        raise _damaged(found.folder, problem.rpartition("; ")[0])
    return found


def _deleted(checkpoints_dir: Path) -> Path:
    """Return the folder where checkpoints go before they are deleted."""
    return checkpoints_dir / ".deleted"


def _damaged(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"run_dir: {what}; move {folder} out of the run to go on from the checkpoint before it")


def _foreign(folder: Path) -> ConfigError:
    return ConfigError(
        f"run_dir: {folder} is no checkpoint of Slipstream, because it has no {_STATE_FILE}. Move it elsewhere, or choose "
        "another run_dir; lora.init_from starts a run from an adapter"
    )


def _folders(checkpoints_dir: Path) -> list[Path]:
    """Return everything with the name of a checkpoint, committed or not, in the order of the steps."""
    steps = ((folder.name.removeprefix("checkpoint-"), folder) for folder in checkpoints_dir.glob("checkpoint-*"))
    return [folder for _, folder in sorted((int(step), folder) for step, folder in steps if step.isdigit())]
