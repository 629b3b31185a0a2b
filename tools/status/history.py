"""The rewards of the last steps, out of `RUN_DIR/steps.jsonl`.

Guarantee: it reads the end of the lines alone, however long the run is; what it cannot read it leaves out.
"""

import json
import math
from pathlib import Path

from protocol.files.rotated_lines import read_end

_TAIL_BYTES = 512 * 1024  # some 200 steps


def rewards_of_steps(run_dir: Path | None) -> dict[int, float]:
    """By step, oldest first."""
    found: dict[int, float] = {}
    for line in _last_lines(run_dir) if run_dir else []:
        try:
            step = json.loads(line)
            number, reward = int(step["step"]), float(step["reward"])
        except (ValueError, LookupError, TypeError):
            continue
        if math.isfinite(reward):
            found[number] = reward
    return found


def _last_lines(run_dir: Path) -> list[bytes]:
    try:
        return read_end(run_dir / "steps.jsonl", _TAIL_BYTES)
    except OSError:
        return []
