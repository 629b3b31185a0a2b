"""The engine alone, without a trainer: each arm of `ARMS` starts one, the most wanted first, until the time is over.

Guarantee: an arm is a process of its own with a limit, and its numbers are written when it ends. An arm that fails, is too slow
or cannot run says so, and the next one runs.
"""

import asyncio
import time

from benchmarks.gpu_check.place import Findings, Place
from benchmarks.gpu_check.plan import ARMS
from benchmarks.gpu_check.runner import Outcome, run_parts


def run(place: Place, seconds: float) -> Findings:
    deadline = time.monotonic() + seconds
    for arm in ARMS:
        outcomes: list[Outcome] = []
        asyncio.run(run_parts([arm], place.gpus, place.folder, deadline - time.monotonic(), outcomes.append))
        [outcome] = outcomes
        for finding in outcome.findings:
            yield finding | {"what": f"{arm.name}, {finding['what']}"}
        if outcome.status != "done":
            yield {"what": arm.name, outcome.status: outcome.reason}
