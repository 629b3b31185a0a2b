"""`rl-trainer` that stands still where a checkpoint begins, while the file named by `CHECKPOINTS_WAIT` exists.

It adds `.reached` to that name when it gets there, and says every two seconds what it waits for. Everything else is real.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from consumer import waiting
from consumer.app import cli
from consumer.app.run import Run

_commit = Run.commit_checkpoint


def commit(run: Run, step: int, staged: Path, write: Callable[[], None]) -> None:
    barrier = Path(os.environ["CHECKPOINTS_WAIT"])
    while barrier.exists():
        barrier.with_suffix(".reached").touch()
        time.sleep(0.02)
    _commit(run, step, staged, write)


if __name__ == "__main__":
    Run.commit_checkpoint = commit
    waiting._SAY_EVERY_S = 2.0
    cli.main()
