"""A real model on a laptop: two processes teach SmolLM2-135M-Instruct to calculate, and say what a step costs.

    python -m examples.smollm2.demo [--steps 40] [--seed 1] [--run-dir runs/smollm2]

With fewer steps it is a test: it fails unless the reward rises.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from examples.arithmetic.demo import run_pair
from examples.folders import build_once, fresh_folder
from slipstream.run_reader import EVALUATIONS, STEPS, RunReader

CONFIG = "examples/smollm2/run.yaml"
BASE = Path("runs/smollm2-base")
WINDOW = 3  # steps averaged for the first and the last reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of the optimizer (default: those of the configuration)")
    parser.add_argument("--seed", type=int, default=1, help="prompt order, sampling and LoRA initialization")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/smollm2"), help="replaced if a demo made it")
    arguments = parser.parse_args()

    build_base_model()
    fresh_folder(arguments.run_dir)
    settings = ["--config", CONFIG, "--set", f"run_dir={arguments.run_dir}", "--set", f"seed={arguments.seed}"]
    if arguments.steps:
        settings += ["--set", f"trainer.max_steps={arguments.steps}", "--set", "evaluation=null"]
    started = time.monotonic()
    run_pair(settings)
    summary = summarize(arguments.run_dir, time.monotonic() - started)
    (arguments.run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"  {name:<15} {value:.3f}" for name, value in summary.items()))
    if summary["reward_last"] <= summary["reward_first"]:
        sys.exit("the reward did not rise, as it did in every run so far")


def build_base_model() -> None:
    """Build the model unless this very script has built them before."""
    script = Path(__file__).with_name("build_model.py").read_bytes()
    command = [sys.executable, "-m", "examples.smollm2.build_model"]
    build_once(BASE, script, lambda folder: subprocess.run([*command, str(folder)], check=True))


def summarize(run_dir: Path, wall_s: float) -> dict[str, float]:
    """Return reward, held-out scores and the cost of a step, from the files that the daemons leave behind."""
    run = RunReader(run_dir)
    steps, scores = run.lines(STEPS), [line["score"] for line in run.lines(EVALUATIONS)]
    if len(steps) < 2:
        sys.exit("the run was stopped before its second step")
    rewards = [step["reward"] for step in steps]
    later = steps[1:]  # the first step waits for the engine's start
    return {
        "steps": steps[-1]["step"],
        "reward_first": statistics.fmean(rewards[:WINDOW]),
        "reward_last": statistics.fmean(rewards[-WINDOW:]),
        **({"held_out_before": scores[0], "held_out_after": scores[-1]} if scores else {}),
        "step_s": (steps[-1]["t"] - steps[0]["t"]) / len(later),
        "training_s": statistics.fmean(step["step_s"] for step in later),
        "waiting_s": statistics.fmean(step["wait_s"] for step in later),
        "wall_s": wall_s,
    }


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    main()
