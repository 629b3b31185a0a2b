"""`make bench-trainer-step`: tokens per second and peak memory of our training step, beside TRL's on the same batch.

Guarantee: both take the step of one batch (forward, loss, backward) with equal weights; two processes take turns step by step,
so that whatever else the machine does falls on both; the losses are compared before any time is.

The batch has completions of log-normal lengths. TRL pads all of it to its longest prompt and completion and passes as many rows
at a time as keep a pass within the number of tokens that ours is given, which is what its user has to choose for that memory.
On a CPU the time is that which the process spent on it (user time), which other processes on the machine do not add to.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": {"hidden_size": 256, "intermediate_size": 1344, "num_hidden_layers": 4, "num_attention_heads": 4,
                  "num_key_value_heads": 1, "vocab_size": 8192, "dtype": "float32"},
        "num_prompts": 4, "num_generations": 8, "prompt_tokens": 80, "median_tokens": 80, "max_tokens": 384,
        "tokens_per_micro_batch": 4096,
    },
    "cuda": {
        "model": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                  "num_key_value_heads": 2, "vocab_size": 151936, "dtype": "bfloat16"},
        "num_prompts": 16, "num_generations": 8, "prompt_tokens": 200, "median_tokens": 400, "max_tokens": 2048,
        "tokens_per_micro_batch": 16384,
    },
}  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
SIDES = ("ours", "trl")


class Side:
    """A process that does what it is asked, such as to take a step. It says its facts first. `place` is that of
    `benchmarks.trainer_step_side`, for one of several processes."""

    def __init__(self, side: str, size: dict[str, Any], folder: Path, threads: int, *place: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.trainer_step_side",
            side,
            json.dumps(size),
            str(folder),
            *map(str, place),
        ]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")

    def step(self) -> dict[str, Any]:
        self.ask("step")
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"a side of the benchmark ended with exit code {self._process.wait()}")


def measure(size: dict[str, Any], repetitions: int, threads: int) -> dict[str, Any]:
    """One step of each that does not count, then `repetitions` of both in turn."""
    with tempfile.TemporaryDirectory(prefix="bench-trainer-step-") as folder:
        sides = {name: Side(name, size, Path(folder), threads) for name in SIDES}
        try:
            facts = {name: side.answer() for name, side in sides.items()}
            steps = {name: [side.step()] for name, side in sides.items()}
            for number in range(repetitions):
                for name in SIDES if number % 2 else SIDES[::-1]:
                    steps[name].append(sides[name].step())
        finally:
            for side in sides.values():
                side.close()
    timed = {name: [step["busy_s"] for step in steps[name][1:]] for name in SIDES}
    ratios = [trl / ours for ours, trl in zip(timed["ours"], timed["trl"], strict=True)]
    tokens = facts["ours"]["tokens"]
    return {
        "size": size,
        "facts": facts,
        "losses": {name: steps[name][0]["loss"] for name in SIDES},
        "gradient_norms": {name: steps[name][0]["gradient_norm"] for name in SIDES},
        "tokens_per_s": {name: tokens / statistics.median(values) for name, values in timed.items()},
        "wall_s": {name: statistics.median(step["wall_s"] for step in steps[name][1:]) for name in SIDES},
        "peak_mb": {name: max(step["peak_mb"] for step in steps[name]) for name in SIDES},
        "speedup": statistics.median(ratios),
        "speedup_quartiles": statistics.quantiles(ratios, n=4),
    }


def unequal_losses(report: dict[str, Any]) -> str:
    """What is wrong with them; "" if they are equal. Times say nothing of steps that do not compute the same."""
    losses, tolerance = report["losses"], TOLERANCE[report["size"]["model"]["dtype"]]
    return "" if abs(losses["ours"] - losses["trl"]) <= tolerance else f"the losses are not equal: {losses}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/trainer_step.json"), help="JSON file to write")
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--repetitions", type=int, default=7, help="of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each side (default: %(default)s)")
    parser.add_argument("--attention", help="attn_implementation of both sides, e.g. flash_attention_2")
    parser.add_argument(
        "--correct",
        action="store_true",
        help="truncated importance correction on both sides; TRL takes its pass for the proximal policy, as beside vLLM",
    )
    parser.add_argument("--size", type=json.loads, default={}, help="JSON that replaces parts of the size")
    arguments = parser.parse_args()
    size = SIZES[arguments.device] | arguments.size
    size |= {"device": arguments.device, "correct": arguments.correct, "attention": arguments.attention}
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **measure(size, arguments.repetitions, arguments.threads),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if problem := unequal_losses(report):
        raise SystemExit(f"bench-trainer-step: {problem}")
    _print(report)


def _print(report: dict[str, Any]) -> None:
    facts = report["facts"]
    print(
        f"{facts['ours']['parameters'] / 1e6:.1f} M parameters, {facts['ours']['rows']} completions, "
        f"{facts['ours']['tokens']} tokens; TRL: {facts['trl']['rows_per_pass']} completions a pass"
    )
    print(f"{'':6}{'tokens/s':>12}{'peak MB':>12}{'passes':>10}{'loss':>14}")
    for name in SIDES:
        print(
            f"{name:6}{report['tokens_per_s'][name]:12.0f}{report['peak_mb'][name]:12.0f}{facts[name]['passes']:10}"
            f"{report['losses'][name]:14.7f}"
        )
    low, middle, high = report["speedup_quartiles"]
    print(f"ours is {middle:.2f}x as fast (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
