"""`make bench-ranks`: a training step of several ranks beside that of one and beside TRL's in as many processes, on the CPU.

Guarantee: all take the step of one batch with equal weights, a thread per process; they take turns step by step, so that whatever
else the machine does falls on all; ours are compared before any time is, by loss and norm of the gradient, and TRL's stand beside
them. Times are of the clock on the wall, which is what ranks are for, so the machine must have a core for each process and
nothing else to do.

The batch is that of `benchmarks/trainer_step.py`, larger, so that arithmetic rules.
"""

import argparse
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.made_on import made_on
from benchmarks.trainer_step import SIZES, TOLERANCE, Side

SIZE = SIZES["cpu"] | {"num_prompts": 8, "device": "cpu", "correct": False, "attention": None}
COMPARED = ("loss", "gradient_norm")


class Arm:
    """The processes of one side, which take a step together."""

    def __init__(self, side: str, world: int, size: dict[str, Any], folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._sides = [Side(side, size, folder, 1, rank, world, port) for rank in range(world)]

    def answers(self) -> list[dict[str, Any]]:
        return [side.answer() for side in self._sides]

    def ask(self, what: str) -> list[dict[str, Any]]:
        for side in self._sides:
            side.ask(what)
        return self.answers()

    def step(self) -> dict[str, Any]:
        """Loss and norm of the gradient, and how long it took until the last process was done."""
        began = time.perf_counter()
        found = self.ask("step")
        return {"wall_s": time.perf_counter() - began, **{name: found[0][name] for name in COMPARED}}

    def close(self) -> None:
        for side in self._sides:
            side.close()


def check_equal(benchmark: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Exits unless two steps over the same rows computed the same. Their loss alone would say little: at the first step it
    follows from the advantages."""
    for name in COMPARED:
        if abs(one[name] - other[name]) > TOLERANCE["float32"] * max(abs(one[name]), 1e-3):
            raise SystemExit(f"{benchmark}: {name} is not equal: {one[name]} and {other[name]}")


def measure(world: int, size: dict[str, Any], repetitions: int) -> dict[str, Any]:
    """One step of each that does not count, then `repetitions` of all in turn."""
    named = {"one": ("ours", 1), "ranks": ("ours", world), "trl": ("trl", world)}
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        arms = {name: Arm(side, count, size, Path(folder)) for name, (side, count) in named.items()}
        try:
            facts = {name: arm.answers()[0] for name, arm in arms.items()}["one"]
            steps = {name: [arm.step()] for name, arm in arms.items()}
            for _ in range(repetitions):
                for name, arm in arms.items():
                    steps[name].append(arm.step())
            exchange = arms["ranks"].ask("exchange")[0]
        finally:
            for arm in arms.values():
                arm.close()
    check_equal("bench-ranks", steps["one"][0], steps["ranks"][0])
    walls = {name: [step["wall_s"] for step in taken[1:]] for name, taken in steps.items()}

    def speedup(over: str) -> list[float]:
        ratios = [slow / fast for slow, fast in zip(walls[over], walls["ranks"], strict=True)]
        return statistics.quantiles(ratios, n=4)

    return {
        "world": world,
        "size": size,
        "facts": facts,
        "losses": {name: taken[0]["loss"] for name, taken in steps.items()},
        "gradient_norms": {name: taken[0]["gradient_norm"] for name, taken in steps.items()},
        "exchange": exchange,
        "tokens_per_s": {name: facts["tokens"] / statistics.median(values) for name, values in walls.items()},
        "speedup_quartiles": {"over one": speedup("one"), "over TRL": speedup("trl")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/ranks.json"), help="JSON file to write")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a side (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=7, help="of each side (default: %(default)s)")
    parser.add_argument("--loss-type", default="dapo", help="TRL's name of it (default: %(default)s)")
    parser.add_argument("--size", type=json.loads, default={}, help="JSON that replaces parts of the size")
    arguments = parser.parse_args()
    report = {
        **made_on(),
        **measure(arguments.ranks, SIZE | arguments.size | {"loss_type": arguments.loss_type}, arguments.repetitions),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    facts = report["facts"]
    print(f"{facts['parameters'] / 1e6:.1f} M parameters, {facts['rows']} completions, {facts['tokens']} tokens")
    for name, value in report["tokens_per_s"].items():
        print(f"{name:6}{value:10.0f} tokens/s{report['losses'][name]:14.7f}")
    exchange = report["exchange"]
    print(f"gradients of 80 MB take {exchange['gradients_s'] * 1e3:.0f} ms, the plan {exchange['plan_s'] * 1e3:.1f} ms")
    for over, (low, middle, high) in report["speedup_quartiles"].items():
        print(f"{report['world']} ranks are {middle:.2f}x as fast {over} (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
