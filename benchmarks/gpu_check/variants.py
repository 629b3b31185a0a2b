"""Our training step in two ways, in turns, on the same batch: tokens per second, peak memory, loss."""

import statistics
from typing import Any

from benchmarks.gpu_check.place import Findings, Place, need_package
from benchmarks.gpu_check.step import size_of
from benchmarks.trainer_step import TOLERANCE, Side

_REPETITIONS = 5


def run(place: Place, ways: dict[str, dict[str, Any]], package: str, same_loss: bool) -> Findings:
    """`ways` replace parts of the size of `benchmarks.trainer_step`. With `same_loss` they must not differ in it."""
    yield {"what": package, "version": need_package(package)}
    sides: dict[str, Side] = {}
    try:
        for name, changes in ways.items():
            folder = place.folder / name
            folder.mkdir()
            sides[name] = Side("ours", size_of(place, None) | changes, folder, 1)
        facts = {name: side.answer() for name, side in sides.items()}
        steps = {name: [side.step()] for name, side in sides.items()}
        for _ in range(_REPETITIONS):
            for name, side in sides.items():
                steps[name].append(side.step())
    finally:
        for side in sides.values():
            side.close()
    for name, taken in steps.items():
        yield {
            "what": name,
            "tokens_per_s": facts[name]["tokens"] / statistics.median(step["wall_s"] for step in taken[1:]),
            "model_mb": min(step["model_mb"] for step in taken),
            "peak_mb": max(step["peak_mb"] for step in taken),
            "passes": facts[name]["passes"],
            "loss": taken[0]["loss"],
        }
    losses = [taken[0]["loss"] for taken in steps.values()]
    yield {"what": "difference of the losses", "loss": max(losses) - min(losses), "tolerance": TOLERANCE[place.dtype]}
    if same_loss and not max(losses) - min(losses) <= TOLERANCE[place.dtype]:
        raise RuntimeError(f"the losses are not equal: {losses}")
