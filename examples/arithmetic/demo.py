"""The demo: build a small base model once, let a real producer and a real trainer teach it, show what came of it.

    python -m examples.arithmetic.demo [--seed 1] [--run-dir runs/demo] [--gpus PRODUCER,TRAINER]

`slipstream run` starts the two daemons, as two processes that share nothing but a socket.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from examples.folders import build_once, fresh_folder

CONFIG = "examples/arithmetic/run.yaml"
BASE = Path("runs/demo-base")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="prompt order, sampling and LoRA initialization")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="replaced if a demo made it")
    parser.add_argument(
        "--gpus", help="GPU of the producer and of the trainer, e.g. 0,1 (default: what the machine has)"
    )
    arguments = parser.parse_args()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # imported, it warns of a kernel that nothing here needs

    fresh_folder(arguments.run_dir)
    build_base_model()
    from examples.arithmetic.evaluate import greedy_accuracy

    eval_before = greedy_accuracy(BASE, BASE / "eval.jsonl")
    print(f"held-out greedy accuracy of the base model: {eval_before:.3f}", flush=True)

    settings = ["--config", CONFIG, "--set", f"run_dir={arguments.run_dir}", "--set", f"seed={arguments.seed}"]
    started = time.monotonic()
    run_pair(settings, arguments.gpus.split(",") if arguments.gpus else None)
    wall_s = time.monotonic() - started

    eval_after = greedy_accuracy(BASE, BASE / "eval.jsonl", arguments.run_dir / "adapter")
    from examples.arithmetic.report import plot, shortfalls, summarize, table

    summary = summarize(arguments.run_dir, eval_before=eval_before, eval_after=eval_after, wall_s=wall_s)
    (arguments.run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    plot(arguments.run_dir)
    print(table(summary))
    print(f"written: {arguments.run_dir}/summary.json, {arguments.run_dir}/reward.png, {arguments.run_dir}/adapter")
    if missed := shortfalls(summary):
        sys.exit(f"the demo did not reach what every seed reached so far: {'; '.join(missed)}")


def build_base_model() -> None:
    """Builds the base model unless this very script has built it before."""
    script = Path(__file__).with_name("build_model.py").read_bytes()
    command = [sys.executable, "-m", "examples.arithmetic.build_model"]
    build_once(BASE, script, lambda folder: subprocess.run([*command, str(folder)], check=True))


def run_pair(settings: list[str], gpus: list[str] | None = None) -> None:
    """Run both daemons from start to end, as a user does in one terminal.

    Args:
        settings: options of `slipstream run`.
        gpus: of producer and trainer (default: those that the machine has).
    """
    if gpus:
        settings = [*settings, "--producer-gpus", gpus[0], "--trainer-gpus", gpus[1]]
    print(f"slipstream run {' '.join(settings)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "slipstream", "run", *settings]).returncode
    if code != 0:
        sys.exit(f"the pair failed with exit code {code}")


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    main()
