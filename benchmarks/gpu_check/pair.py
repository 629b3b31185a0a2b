"""Both daemons on one GPU (`pipeline.gpu: shared`), started as a user starts them: what steps, swaps and ratios were. With
several ranks the producer is on the GPU of the first, with a share that is named.

The first step trains on what version 0 sampled, so its ratios are what engine and trainer differ by, and nothing else.
"""

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu_check.model import write_run
from benchmarks.gpu_check.place import Findings, Place
from examples.arithmetic.demo import run_pair
from protocol.config.loader import load_config
from protocol.gpu.memory import GIB, preview
from protocol.gpu.nvml import gpu_facts
from slipstream.run_reader import STEPS, Line, RunReader

_LOOK_EVERY_S = 0.5
_RATIO = "sampling/importance_sampling_ratio/"


def run(place: Place, mode: str, ranks: int = 1) -> Findings:
    run_dir = place.folder / "run"
    path = write_run(place, run_dir, mode, 0.4 if ranks > 1 else None)
    for line in preview(load_config(str(path), ["pipeline.gpu=shared"]), place.gpu if ranks == 1 else "cpu"):
        yield {"what": "shares", "computed": line}
    trainer = place.gpu if ranks == 1 else ",".join(map(str, range(ranks)))
    failure: SystemExit | None = None
    with most_used(place.gpus) as used:
        try:
            run_pair(["--config", str(path)], [place.gpu, trainer])
        except SystemExit as error:
            failure = error
    yield from ({"what": f"memory of GPU {gpu}", "most_used_gib": most / GIB} for gpu, most in used.items())
    reader = RunReader(run_dir)
    steps = reader.lines(STEPS)
    if steps:
        yield from _of_steps(steps)
    events = [event for timeline in reader.timelines() for event in timeline]
    stats = [event for event in events if event["event"] == "stats"]
    if stats:
        busy_s = max(1e-9, stats[-1]["busy_s"])
        per_s = {f"{name}_per_s": stats[-1][name] / busy_s for name in ("tokens", "groups")}
        yield {"what": "producer while busy", "busy_s": busy_s, **per_s}
    swaps = [event["ms"] for event in events if event["event"] == "swap"]
    if swaps:
        yield {"what": "swaps", "count": len(swaps), "median_ms": statistics.median(swaps), "longest_ms": max(swaps)}
    if failure is not None:
        raise failure


@contextmanager
def most_used(gpus: Sequence[int]) -> Iterator[dict[int, int]]:
    """The most bytes that were in use on each GPU while it lasts, by index."""
    most: dict[int, int] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_EVERY_S):
            for gpu in gpus:
                if (facts := gpu_facts(gpu)) is not None:
                    most[gpu] = max(most.get(gpu, 0), facts.used_bytes)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


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
