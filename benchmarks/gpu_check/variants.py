"""Our training step in two ways, in turns, on the same batch: tokens per second, memory, gradient.

The gradient is compared, because the loss of a first step follows from the advantages alone."""

import statistics
from typing import Any

from benchmarks.gpu_check.place import Findings, Place, need_package
from benchmarks.gpu_check.step import size_of
from benchmarks.trainer_step import Side

_REPETITIONS = 5
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of the norm


def run(place: Place, ways: dict[str, dict[str, Any]], package: str, equal: bool) -> Findings:
    """`ways` replace parts of the size of `benchmarks.trainer_step`. With `equal` their gradients must not differ."""
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
            "passes": taken[-1]["passes"],
            "gradient_norm": taken[0]["gradient_norm"],
        }
    norms = [taken[0]["gradient_norm"] for taken in steps.values()]
    difference = (max(norms) - min(norms)) / max(norms)
    yield {"what": "relative difference of the gradient norms", "share": difference}
    if equal and not difference <= _TOLERANCE[place.dtype]:
        raise RuntimeError(f"the gradients are not equal: their norms are {norms}")
