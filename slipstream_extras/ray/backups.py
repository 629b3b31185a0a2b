"""Copies of a run in another place, such as a network disk, that outlive the node of the trainer.

Guarantee: a copy appears whole under its name or not at all (`slipstream journal backup`). The newest two copies of a run stay,
and nothing but older copies of the same run is deleted. A copy that fails is an event, and the next one is tried at its time.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from protocol.errors import JournalError
from replay.journal.reader import JournalReader
from slipstream_extras.ray.plan import namespace

EVERY_S = 600.0
_KEPT = 2
_TIMEOUT_S = 3600.0
_NAME = re.compile(r"backup-\d{8}-\d{6}-\d+")


def back_up(run_dir: str, folder: str) -> str:
    """Make one copy on the trainer's node, delete older ones, and return the outcome in words.

    Runs may share `folder`, because each has a folder of its own there.
    """
    place = Path(folder) / namespace(run_dir)
    to = _new_name(place)
    command = [sys.executable, "-P", "-m", "slipstream", "journal", "--run", run_dir, "backup", "--to", str(to)]
    try:
        place.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no backup in {folder}: {error}"
    if made.returncode:
        return f"no backup: {made.stderr.strip()[-1000:]}"
    try:
        _delete_older(place, to)
    except OSError as error:
        return f"backup in {to}; older copies stay: {error}"
    return f"backup in {to}"


def _new_name(place: Path) -> Path:
    """Return a path of this second, and of this process: the manager and `slipstream cluster down` may both make a copy."""
    return place / f"backup-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _delete_older(place: Path, newest: Path) -> None:
    """Delete all copies of the run of `newest` but the newest ones."""
    run_id = _run_id(newest)
    names = sorted(path for path in place.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink())
    for copy in [path for path in names if run_id and _run_id(path) == run_id][:-_KEPT]:
        with contextlib.suppress(FileNotFoundError):  # another process deletes it too
            shutil.rmtree(copy)


def _run_id(copy: Path) -> str | None:
    """Return the run that a copy is of, or None for anything else."""
    try:
        with contextlib.closing(JournalReader(copy / "journal.sqlite")) as reader:
            return reader.facts().get("run_id")
    except (JournalError, OSError):
        return None


def start(run_dir: str, folder: Callable[[], str], note: Callable[[str], None]) -> None:
    """Make copies on a thread that ends with its process, while `folder` returns a place for them and not an empty text."""

    def work() -> None:
        while True:
            time.sleep(EVERY_S)
            if place := folder():
                note(back_up(run_dir, place))

    threading.Thread(target=work, name="backups", daemon=True).start()
