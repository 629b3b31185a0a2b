"""Copies of a run in another place, such as a network disk, that outlive the node of the trainer.

Guarantee: a copy appears whole under its name or not at all (`rl-journal backup`), and the newest two stay. A copy that fails is
an event, and the next one is tried at its time; the run goes on.
"""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

EVERY_S = 600.0
_KEPT = 2
_TIMEOUT_S = 3600.0
_PREFIX = "backup-"


def back_up(run_dir: str, folder: str) -> str:
    """On the trainer's node: makes one copy and deletes those that are too many. What came of it, in words."""
    place = Path(folder)
    to = place / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "tools.journal.cli", "--run", run_dir, "backup", "--to", str(to)]
    try:
        place.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if made.returncode:
            return f"no backup: {made.stderr.strip()[-1000:]}"
        for old in sorted(place.glob(f"{_PREFIX}*"))[:-_KEPT]:
            shutil.rmtree(old)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no backup in {folder}: {error}"
    return f"backup in {to}"


def start(run_dir: str, folder: Callable[[], str], say: Callable[[str], None]) -> None:
    """On a thread that ends with its process. `folder` is asked each time; empty: no copy is wanted."""

    def work() -> None:
        while True:
            time.sleep(EVERY_S)
            if place := folder():
                say(back_up(run_dir, place))

    threading.Thread(target=work, name="backups", daemon=True).start()
