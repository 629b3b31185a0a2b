"""`make bench-startup`: how long a user waits: for the first token, for the first step, and for `--help` and `--check`.

Guarantee: the pair is the product's two daemons on the demo's model and task, started at the same moment, each with a
stopwatch (`benchmarks.startup_side`); phases of a daemon follow one another and add up. Commands are whole processes, from
start to exit, that take turns.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples.arithmetic.demo import CONFIG, build_base_model

COMMANDS = {
    "rl-producer --help": ["producer.cli", "--help"],
    "rl-trainer --help": ["consumer.cli", "--help"],
    "rl-producer --check": ["producer.cli", "--config", CONFIG, "--check"],
    "rl-trainer --check": ["consumer.cli", "--config", CONFIG, "--check"],
    "rl-journal --help": ["tools.journal.cli", "--help"],
    "rl-status --help": ["tools.status.cli", "--help"],
    "rl-keys --help": ["tools.keys.cli", "--help"],
}
PRODUCER = (
    "interpreter",
    "imports",
    "reward workers",
    "import of vLLM",
    "engine configuration",
    "engine start, model load",
    "warm-up",
    "connected",
    "first adapter",
    "first lease",
    "first token",
    "first group",
)
TRAINER = (
    "interpreter",
    "imports",
    "dataset and model facts",
    "model and trainer",
    "open for producers",
    "first producer",
    "first group",
    "first batch",
    "first step",
)
_ENDS_WITHIN_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/startup.json"), help="JSON file to write")
    parser.add_argument("--repeat", type=int, default=3, help="starts of the pair (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="of each command (default: %(default)s)")
    arguments = parser.parse_args()
    commands: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.calls):
        for name, command in COMMANDS.items():
            commands[name].append(command_s(command))
    build_base_model()
    pairs = [pair_stamps() for _ in range(arguments.repeat)]
    report = {
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "commands_s": {
            name: {"median": float(np.median(times)), "max": max(times)} for name, times in commands.items()
        },
        "pairs": pairs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    _print(report)


def command_s(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def pair_stamps() -> dict[str, dict[str, float]]:
    """Seconds from the start of both processes to each stamp of each."""
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as folder:
        run = Path(folder)
        settings = ["--gpu", "cpu", "--config", CONFIG, "--set", f"run_dir={run}", "--set", "trainer.max_steps=2"]
        started = time.monotonic()
        sides = {name: _start(run, name, module, settings) for name, module in _MODULES.items()}
        try:
            for name, side in sides.items():
                if side.wait(_ENDS_WITHIN_S) != 0:
                    raise RuntimeError(
                        f"{name} ended with {side.returncode}:\n{(run / f'{name}.log').read_text()[-3000:]}"
                    )
        finally:
            for side in sides.values():
                if side.poll() is None:
                    side.terminate()
                    side.wait(60)
        stamps = {
            name: {line["name"]: line["t"] - started for line in map(json.loads, (run / f"{name}.stamps").open())}
            for name in sides
        }
        log = (run / "producer.log").read_text(errors="replace")
    for name, pattern in _SAID_BY_VLLM.items():
        if found := re.search(pattern, log):
            stamps["producer"][name] = float(found[1])
    return stamps


_MODULES = {"trainer": "consumer.cli", "producer": "producer.cli"}
_SAID_BY_VLLM = {
    "of which vLLM: model load": r"Model loading took .* and ([\d.]+) seconds",
    "of which vLLM: KV cache, warm-up": r"init engine .* took ([\d.]+) s",
}


def _start(run: Path, name: str, module: str, settings: list[str]) -> "subprocess.Popen[bytes]":
    with (run / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.startup_side", str(run / f"{name}.stamps"), module, *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"},
        )


def _print(report: dict[str, Any]) -> None:
    print("\n| command | median s | longest s |\n|---|---:|---:|")
    for name, times in report["commands_s"].items():
        print(f"| `{name}` | {times['median']:.2f} | {times['max']:.2f} |")
    for side, phases in (("producer", PRODUCER), ("trainer", TRAINER)):
        print(f"\n| {side} | s | after s |\n|---|---:|---:|")
        before = [0.0] * len(report["pairs"])
        for phase in phases:
            reached = [pair[side][phase] for pair in report["pairs"]]
            took = np.median([now - then for now, then in zip(reached, before, strict=True)])
            print(f"| {phase} | {took:.2f} | {np.median(reached):.2f} |")
            before = reached
        for name in _SAID_BY_VLLM if side == "producer" else ():
            said = [pair[side][name] for pair in report["pairs"] if name in pair[side]]
            if said:
                print(f"| {name} | {np.median(said):.2f} | |")


if __name__ == "__main__":
    main()
