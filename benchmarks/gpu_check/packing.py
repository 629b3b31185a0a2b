"""Our training step with packed rows (FlashAttention) beside the same with padded rows (SDPA), in turns."""

import statistics

from benchmarks.gpu_check.place import Findings, Place, need_package
from benchmarks.gpu_check.step import size_of
from benchmarks.trainer_step import TOLERANCE, Side

_WAYS = {"padded": None, "packed": "flash_attention_2"}
_REPETITIONS = 5


def run(place: Place) -> Findings:
    need_package("flash-attn")
    sizes = {name: size_of(place, attention) for name, attention in _WAYS.items()}
    sides = {}
    try:
        for name, size in sizes.items():
            folder = place.folder / name
            folder.mkdir()
            sides[name] = Side("ours", size, folder, 1)
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
            "peak_mb": max(step["peak_mb"] for step in taken),
            "passes": facts[name]["passes"],
            "loss": taken[0]["loss"],
        }
    difference = abs(steps["padded"][0]["loss"] - steps["packed"][0]["loss"])
    if difference > TOLERANCE[place.dtype]:
        raise RuntimeError(f"the losses of packed and padded rows differ by {difference:.3g}")
