"""The demo of the README with both daemons on one GPU, exactly as `make demo` runs it."""

import json
import subprocess
import sys

from benchmarks.gpu_check.place import Findings, Place


def run(place: Place) -> Findings:
    run_dir = place.folder / "run"
    command = [sys.executable, "-m", "examples.arithmetic.demo", "--run-dir", str(run_dir)]
    done = subprocess.run([*command, "--gpus", f"{place.gpu},{place.gpu}"], check=False)
    if not (written := run_dir / "summary.json").exists():
        done.check_returncode()
    summary = json.loads(written.read_text(encoding="utf-8"))
    names = ("eval_before", "eval_after", "steps", "wall_s", "overlap_efficiency", "swap_p50_ms", "swap_p99_ms")
    yield {"what": "summary", **{name: summary[name] for name in names}}
    done.check_returncode()  # it learned less than it should
