"""What `campaigns.chaos.zygote` imports and runs for `rl-trainer` and `slipstream sft`."""

import multiprocessing
from typing import Any

from campaigns.chaos import trainer_child
from campaigns.chaos.forked_ranks import forked_ranks
from tests.integration import warm

preload = trainer_child.preload


def main(request: dict[str, Any]) -> int:
    if request["module"] == "consumer.app.cli" and not request["spawns"]:
        forked_ranks(request["argv"])
    if request["module"] == "benchmarks.offpolicy":  # its runs have a process each
        forks = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method: forks
    return warm.run(request)
