"""The policies that a run has left, adapters or whole models, for `slipstream export` and `slipstream.Run`.

Guarantee: what is found was written whole. If there is none, the error lists those that there are.
"""

from pathlib import Path

from consumer.learn import checkpoints
from protocol.errors import ConfigError
from protocol.wire import weight_patch

_FILES = (*checkpoints.FINAL_FOLDERS.values(), weight_patch.FILE)
"""A folder of a policy has one of these files."""


def choose_adapter(run_dir: Path, which: str) -> Path:
    """Return the folder of a policy; `ConfigError` if there is none.

    Args:
        which: `last`, `best`, the step of a checkpoint or of an adapter that stayed of one, or a folder.
    """
    checkpoints_dir, kept = run_dir / "checkpoints", checkpoints.kept_adapters(run_dir)
    if which == "last":
        return _last(run_dir, checkpoints_dir)
    if which == "best" or which.isdigit():
        folder = checkpoints_dir / ("best" if which == "best" else f"checkpoint-{int(which)}")
        folder = folder if folder.is_dir() else kept.get(int(which) if which.isdigit() else -1, folder)
    else:
        folder = Path(which)
    if not any((folder / name).is_file() for name in _FILES):
        steps = sorted({*kept, *(checkpoint.step for checkpoint in checkpoints.committed(checkpoints_dir))})
        raise ConfigError(
            f"{which}: there are no weights in {folder}; steps that the run has kept: {', '.join(map(str, steps)) or 'none'}"
        )
    return folder


def _last(run_dir: Path, checkpoints_dir: Path) -> Path:
    """The final policy, unless the run went on after it."""
    found = checkpoints.newest_adapter(run_dir, checkpoints_dir)
    if found is None:
        raise ConfigError(f"run_dir: {run_dir} has no weights yet: neither a checkpoint nor the final ones")
    return found[0]
