"""One training run of `benchmarks.offpolicy` by the real pair: rl-producer with vLLM and rl-trainer, two processes.

Guarantee: steps, learning rate, model, prompts and correction are those of the scripted runs. The staleness is what comes
of the race between the two, within `max_staleness`; the result says how much that was.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.offpolicy_run import Case, Plan, describe
from examples.arithmetic.demo import run_pair
from examples.arithmetic.evaluate import greedy_accuracy


def train_pair(plan: Plan, case: Case, run_dir: Path) -> dict[str, Any]:
    """Trains one run and returns what came of it. Its curve is that of the checkpoints."""
    started = time.monotonic()
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offpolicy-") as sockets:  # paths of sockets must be short
        settings = [
            *plan.settings(case, run_dir),
            f"transport.endpoint=ipc://{sockets}/control.ipc",
            f"trainer.save_steps={plan.evaluate_every}",
        ]
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        run_pair(["--config", "examples/arithmetic/run.yaml", *arguments])
    base = Path(plan.base)
    curve = {
        step: greedy_accuracy(base, base / "eval.jsonl", run_dir / "checkpoints" / f"checkpoint-{step}")
        for step in range(plan.evaluate_every, plan.steps + 1, plan.evaluate_every)
    }
    curve[0] = greedy_accuracy(base, base / "eval.jsonl")
    return describe(plan, case, curve, run_dir, started)
