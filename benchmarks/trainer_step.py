"""`make bench-trainer-step`: CPU seconds and peak memory of our training step, beside TRL's two trainers on the same batch.

Guarantee: every side takes the step of one batch (forward, loss, backward) with equal weights; a process per side, which take
turns step by step, so that whatever else the machine does falls on all; losses and norms of gradients are compared before any
time is. On a CPU the time is that which the process spent on it, in the kernel too, which other processes do not add to.

The batch has completions of log-normal lengths. TRL's asynchronous trainer (`benchmarks/trainer_step_async.py`) forwards each
prompt once, in passes of as many positions as ours. GRPOTrainer pads all of the batch to its longest prompt and completion, in
passes of `padded_tokens`, which is what its user has to choose for that memory.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.made_on import made_on

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": {"hidden_size": 256, "intermediate_size": 1344, "num_hidden_layers": 4, "num_attention_heads": 4,
                  "num_key_value_heads": 1, "vocab_size": 8192, "dtype": "float32"},
        "num_prompts": 4, "num_generations": 8, "prompt_tokens": 80, "median_tokens": 80, "max_tokens": 384,
        "tokens_per_micro_batch": 1200, "padded_tokens": 4096,
    },
    "cuda": {
        "model": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                  "num_key_value_heads": 2, "vocab_size": 151936, "dtype": "bfloat16"},
        "num_prompts": 16, "num_generations": 8, "prompt_tokens": 200, "median_tokens": 400, "max_tokens": 2048,
        "tokens_per_micro_batch": 16384, "padded_tokens": 16384,
    },
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "both": {},
    "long prompts": {"prompt_tokens": 400, "median_tokens": 40, "max_tokens": 128},
    "long completions": {"prompt_tokens": 20, "median_tokens": 150, "max_tokens": 512},
    "SmolLM2-135M": {
        "model": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                  "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "dtype": "float32"},
        "num_prompts": 2, "prompt_tokens": 200,
    },
}  # fmt: skip
"""Parts of the size of `cpu` that are replaced. The weights of SmolLM2-135M are random, in the shape of that model."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
PEERS = ("trl_async", "trl")
_FEW = 2  # steps of GRPOTrainer, which is no close race


class Side:
    """A process that does what it is asked, such as to take a step. It says its facts first. `place` is that of
    `benchmarks.trainer_step_side`, for one of several processes."""

    def __init__(self, side: str, size: dict[str, Any], folder: Path, threads: int, *place: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [
            *(sys.executable, "-W", "ignore", "-m", "benchmarks.trainer_step_side"),
            *(side, json.dumps(size), str(folder), *map(str, place)),
        ]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")

    def answer_to(self, what: str) -> dict[str, Any]:
        self.ask(what)
        return self.answer()

    def step(self) -> dict[str, Any]:
        return self.answer_to("step")

    def close(self) -> None:
        self._process.communicate()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"a side of the benchmark ended with exit code {self._process.wait()}")


def measure(
    size: dict[str, Any], repetitions: int, threads: int, names: Sequence[str], *, limit: bool = False
) -> dict[str, Any]:
    """One step of each that does not count, then `repetitions` in turn. With `limit` ours also says what its products with
    weights take alone, and what else the step does."""
    with tempfile.TemporaryDirectory(prefix="bench-trainer-step-") as folder:
        sides = {name: Side(name, size, Path(folder), threads) for name in names}
        try:
            facts = {name: side.answer() for name, side in sides.items()}
            steps = {name: [side.step()] for name, side in sides.items()}
            limits = [0.0]
            for number in range(repetitions):
                for name in names if number % 2 else names[::-1]:
                    if name != "trl" or number < _FEW or "trl_async" not in names:
                        steps[name].append(sides[name].step())
                if limit:
                    limits.append(sides["ours"].answer_to("limit")["busy_s"])
            shares = sides["ours"].answer_to("profile") if limit else {}
        finally:
            for side in sides.values():
                side.close()
    timed = {name: [step["busy_s"] for step in steps[name][1:]] for name in names}
    ratios = {
        name: [theirs / own for own, theirs in zip(timed["ours"], timed[name], strict=False)] for name in names[1:]
    }
    tokens = facts["ours"]["tokens"]
    return {
        "size": size,
        "facts": facts,
        "losses": {name: steps[name][0]["loss"] for name in names},
        "gradient_norms": {name: steps[name][0]["gradient_norm"] for name in names},
        "positions": {name: steps[name][-1]["positions"] for name in names},
        "passes": {name: steps[name][-1]["passes"] for name in names},
        "tokens_per_s": {name: tokens / statistics.median(values) for name, values in timed.items()},
        "busy_s": {name: statistics.median(values) for name, values in timed.items()},
        "wall_s": {name: statistics.median(step["wall_s"] for step in steps[name][1:]) for name in names},
        "peak_mb": {name: max(step["peak_mb"] for step in steps[name]) for name in names},
        "resident_mb": {name: max(step["resident_mb"] for step in steps[name]) for name in names},
        "speedups": {name: statistics.quantiles(values, n=4) for name, values in ratios.items()},
        "limit_s": statistics.median(limits[1:] or limits),
        "shares": shares,
    }


def unequal_losses(report: dict[str, Any]) -> str:
    """What is wrong with losses and norms of gradients; "" if they are equal. Times say nothing of steps that do not compute
    the same."""
    tolerance = TOLERANCE[report["size"]["model"]["dtype"]]
    for name in ("losses", "gradient_norms"):
        own, *others = report[name].values()
        if any(abs(other - own) > tolerance * max(1, abs(own)) for other in others):
            return f"the {name.replace('_', ' ')} are not equal: {report[name]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/trainer_step.json"), help="JSON file to write")
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument(
        "--repetitions", type=int, default=5, help="of ours and the nearest, at least 2 (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each side (default: %(default)s)")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="on a CPU (default: all)"
    )
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=("off", "on"))
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="default: both; on CUDA, and with --correct, trl")
    parser.add_argument("--attention", help="attn_implementation of ours and GRPOTrainer, e.g. flash_attention_2")
    parser.add_argument(
        "--correct",
        action="store_true",
        help="truncated importance correction; GRPOTrainer takes its pass for the proximal policy, as beside vLLM",
    )
    parser.add_argument("--size", type=json.loads, default={}, help="JSON that replaces parts of the size")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    peers = arguments.peers or (PEERS if on_cpu and not arguments.correct else ("trl",))
    rest = {"device": arguments.device, "correct": arguments.correct, "attention": arguments.attention}
    report: dict[str, Any] = {**made_on(), "rows": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for shape, checkpointing in itertools.product(arguments.shapes if on_cpu else ("both",), arguments.checkpointing):
        trainer = {"trainer": {"gradient_checkpointing": checkpointing == "on"}}
        size = SIZES[arguments.device] | SHAPES[shape] | trainer | rest | arguments.size
        found = measure(size, arguments.repetitions, arguments.threads, ("ours", *peers), limit=on_cpu)
        report["rows"].append({"shape": shape, "checkpointing": checkpointing, **found})
        arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
        _print(report["rows"][-1])
        if problem := unequal_losses(found):
            raise SystemExit(f"bench-trainer-step: {problem}")


def _print(row: dict[str, Any]) -> None:
    facts = row["facts"]["ours"]
    print(
        f"{row['shape']}, gradient checkpointing {row['checkpointing']}: {facts['parameters'] / 1e6:.1f} M parameters, "
        f"{facts['rows']} completions, {facts['tokens']} tokens"
    )
    print(
        f"  {'':12}{'busy s':>8}{'x ours':>8}{'quartiles':>14}{'positions':>11}{'passes':>8}{'peak MB':>9}{'above':>7}     loss"
    )
    for name, busy_s in row["busy_s"].items():
        low, middle, high = row["speedups"].get(name, (1.0, 1.0, 1.0))
        quartiles, ratio = f"{low:.2f} to {high:.2f}", f"{middle:.2f}"
        print(
            f"  {name:12}{busy_s:8.2f}{ratio:>8}{quartiles:>14}{row['positions'][name]:11}{row['passes'][name]:8}"
            f"{row['resident_mb'][name]:9.0f}{row['peak_mb'][name]:7.0f}{row['losses'][name]:13.7f}"
        )
    if row["shares"]:
        limit = row["limit_s"] / row["busy_s"]["ours"]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in row["shares"].items())
        print(
            f"  products with weights alone: {row['limit_s']:.2f} s, {limit:.0%} of ours; by kind: {shares}", flush=True
        )


if __name__ == "__main__":
    main()
