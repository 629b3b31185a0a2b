"""`rl-trainer` that stands still where a checkpoint begins, while the file named by `CHECKPOINTS_WAIT` exists.

It adds `.reached` to that name when it gets there. Everything else is real.
"""

import os
import time
from pathlib import Path

from consumer import checkpoints, cli

_clear_leftovers = checkpoints.clear_leftovers


def clear_leftovers(checkpoints_dir: Path) -> None:
    _clear_leftovers(checkpoints_dir)
    barrier = Path(os.environ["CHECKPOINTS_WAIT"])
    while barrier.exists():
        barrier.with_suffix(".reached").touch()
        time.sleep(0.02)


if __name__ == "__main__":
    checkpoints.clear_leftovers = clear_leftovers
    cli.main()
