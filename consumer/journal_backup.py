"""`rl-journal backup`: a run as it is now, copied while its trainer goes on.

Guarantee: the folder appears under its name when it is complete and on the disk, or not at all; `rl-trainer --resume` goes on
from it: its journal holds every group that its checkpoint, or a start from scratch, needs.
"""

import os
import shutil
from pathlib import Path

from consumer import checkpoints
from consumer.journal_text import say, size
from protocol.errors import JournalError
from replay.disk import sync
from replay.journal_reader import JournalReader

_ATTEMPTS = 5
_BESIDE = ("steps.jsonl", "rollouts.jsonl", "rollouts.1.jsonl", "trainer.json")


def backup(reader: JournalReader, to: Path) -> None:
    """Raises:
    JournalError: `to` exists or cannot be written, or checkpoints come and go faster than they are copied.
    """
    if to.exists():
        raise JournalError(f"--to {to}: exists already; choose a new folder")
    partial = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        for _ in range(_ATTEMPTS):
            shutil.rmtree(partial, ignore_errors=True)
            if _copy(reader, partial):
                break
        else:
            raise JournalError(
                f"the trainer deleted each of {_ATTEMPTS} checkpoints while it was copied; raise trainer.save_total_limit or "
                "trainer.save_steps"
            )
        _sync_all(partial)
        partial.rename(to)
        sync(to.parent)
    except OSError as error:
        raise JournalError(f"--to {to}: cannot be written: {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    found = checkpoints.latest(to / "checkpoints")
    start = f"checkpoint-{found.step}" if found else "no checkpoint"
    say(f"{start} and a journal of {size((to / reader.path.name).stat().st_size)} in {to}")
    say(f"go on from it: rl-trainer --resume --set run_dir={to} ...")


def _copy(reader: JournalReader, to: Path) -> bool:
    """Copies into `to`; False if it has to be done again.

    The checkpoint comes first, because groups that came after it are trained again, but groups that it has trained may be
    gone. The journal keeps what the oldest checkpoint needs, so that it fits if ours is still there afterwards.
    """
    run_dir = reader.path.parent
    found = checkpoints.latest(run_dir / "checkpoints")
    (to / "checkpoints").mkdir(parents=True)
    if found is not None:
        try:
            shutil.copytree(found.folder, to / "checkpoints" / found.folder.name)
        except (FileNotFoundError, shutil.Error):
            if checkpoints.is_committed(found.folder):
                raise
            return False
    for name in _BESIDE:
        if (run_dir / name).is_file():
            shutil.copy2(run_dir / name, to / name)
    reader.copy_to(to / reader.path.name)
    if found is None:
        return checkpoints.latest(run_dir / "checkpoints") is None
    return checkpoints.is_committed(found.folder)


def _sync_all(folder: Path) -> None:
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place) / name)
        sync(Path(place))
