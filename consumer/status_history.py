"""The rewards of the last steps, out of `RUN_DIR/steps.jsonl`.

Guarantee: it reads the end of the file alone, however long the run is; what it cannot read it leaves out.
"""

import json
import math
from pathlib import Path

_TAIL_BYTES = 512 * 1024  # some 200 steps


def rewards_of_steps(run_dir: Path | None) -> dict[int, float]:
    """By step, oldest first."""
    found: dict[int, float] = {}
    for line in _last_lines(run_dir / "steps.jsonl") if run_dir else []:
        try:
            step = json.loads(line)
            number, reward = int(step["step"]), float(step["reward"])
        except (ValueError, LookupError, TypeError):
            continue
        if math.isfinite(reward):
            found[number] = reward
    return found


def _last_lines(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, 2) - _TAIL_BYTES)
            stream.seek(start)
            lines = stream.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []
    return lines[1:] if start else lines
