"""The demo: a small model that gets products wrong learns from a real producer and a real trainer to use a calculator.

python -m examples.calculator.demo [--mcp] [--run-dir runs/calculator] [--steps 20]

With `--mcp` the tool is that of an MCP server.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from examples.arithmetic.demo import run_pair
from examples.calculator.evaluate import greedy_accuracy
from examples.folders import fresh_folder
from slipstream.run_reader import STEPS, RunReader

CONFIG = "examples/calculator/run.yaml"
WINDOW = 3  # steps averaged for the first and the last reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/calculator"), help="replaced if a demo made it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="prompt order, sampling and LoRA initialization")
    parser.add_argument("--mcp", action="store_true", help="take the tool from an MCP server")
    arguments = parser.parse_args()

    run_dir, started = arguments.run_dir, time.monotonic()
    fresh_folder(run_dir)
    base = run_dir / "base"
    subprocess.run([sys.executable, "-m", "examples.calculator.build_model", str(base)], check=True)
    alone, before = greedy_accuracy(base, base / "eval.jsonl")
    print(f"held-out greedy accuracy of the base model: {alone:.3f} alone, {before:.3f} with a calculator", flush=True)

    settings = ["--config", CONFIG, "--set", f"run_dir={run_dir}", "--set", f"seed={arguments.seed}"]
    settings += ["--set", f"model.path={base}", "--set", f"dataset.path={base}/train.jsonl"]
    settings += ["--set", f"evaluation.dataset.path={base}/eval.jsonl"]
    settings += ["--set", f"trainer.max_steps={arguments.steps}"]
    if arguments.mcp:
        servers = [{"command": [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]}]
        settings += [
            "--set",
            "environment.factory=mcp",
            "--set",
            f"environment.options={json.dumps({'servers': servers})}",
        ]
        settings += ["--set", "environment.max_concurrent=8"]  # each has a server of its own
    run_pair(settings, ["cpu", "cpu"])

    still_alone, after = greedy_accuracy(base, base / "eval.jsonl", run_dir / "adapter")
    rewards = [step["reward"] for step in RunReader(run_dir).lines(STEPS)]
    summary = {
        "alone_before": alone,
        "eval_before": before,
        "alone_after": still_alone,
        "eval_after": after,
        "reward_first": sum(rewards[:WINDOW]) / WINDOW,
        "reward_last": sum(rewards[-WINDOW:]) / WINDOW,
        "wall_s": time.monotonic() - started,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"  {name:<13} {value:.3f}" for name, value in summary.items()))


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    main()
