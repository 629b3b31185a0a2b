"""What `campaigns.chaos.zygote` imports and runs for `rl-trainer` and `slipstream sft`."""

from typing import Any

from campaigns.chaos import trainer_child
from campaigns.chaos.forked_ranks import forked_ranks
from tests.integration import warm

preload = trainer_child.preload


def main(request: dict[str, Any]) -> int:
    if request["module"] == "consumer.app.cli" and not request["spawns"]:
        forked_ranks(request["argv"])
    return warm.run(request)
