"""Both daemons on one GPU, started as a user starts them: what steps, swaps and ratios were.

The first step trains on what version 0 sampled, so its ratios are what engine and trainer differ by, and nothing else.
"""

import statistics
from typing import Any

from benchmarks.gpu_check.model import write_run
from benchmarks.gpu_check.place import Findings, Place
from examples.arithmetic.demo import run_pair
from tools.run_reader import STEPS, Line, RunReader

_RATIO = "sampling/importance_sampling_ratio/"


def run(place: Place, mode: str, ranks: int = 1) -> Findings:
    run_dir = place.folder / "run"
    path = write_run(place, run_dir, mode)
    trainer = place.gpu if ranks == 1 else ",".join(map(str, place.gpus[:ranks]))
    failure: SystemExit | None = None
    try:
        run_pair(run_dir, ["--config", str(path)], [place.gpu, trainer])
    except SystemExit as error:
        failure = error
    reader = RunReader(run_dir)
    steps = reader.lines(STEPS)
    if steps:
        yield from _of_steps(steps)
    swaps = [event["ms"] for timeline in reader.timelines() for event in timeline if event["event"] == "swap"]
    if swaps:
        yield {"what": "swaps", "count": len(swaps), "median_ms": statistics.median(swaps), "longest_ms": max(swaps)}
    if failure is not None:
        raise failure


def _of_steps(steps: list[Line]) -> Findings:
    rest = steps[1:] or steps
    wall_s = max(1e-9, steps[-1]["t"] - steps[0]["t"])
    yield {
        "what": "steps",
        "steps": len(steps),
        "step_s": statistics.median(step["step_s"] for step in rest),
        "wait_s": statistics.median(step["wait_s"] for step in rest),
        "trained_tokens_per_s": sum(step["tokens"] for step in rest) / wall_s,
        "reward_first": steps[0]["reward"],
        "reward_last": steps[-1]["reward"],
    }
    yield {"what": "ratios of the first step", **_ratios(steps[0])}


def _ratios(step: Line) -> dict[str, Any]:
    names = ("mean", "min", "max", "p01", "p99", "effective_sample_share", "kl")
    return {name: step[_RATIO + name] for name in names if _RATIO + name in step}
