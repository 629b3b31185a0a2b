"""`rl-trainer` that is on the GPU of `tests.integration.one_gpu` in its turns, and dies in the turn that `DIES_IN_TURN` says. All
else is real."""

import math
import os
import signal
from typing import Any

from consumer.app import cli
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.device_moves import DeviceMoves
from tests.integration.one_gpu import OneGpu

_back, _out, _step = DeviceMoves.back, DeviceMoves.out, SlipstreamTrainer.training_step
_gpu = OneGpu("trainer")
_turns = 0


def back(self: DeviceMoves) -> None:
    global _turns
    _gpu.come()
    _back(self)
    _turns += 1
    if _turns == int(os.environ.get("DIES_IN_TURN", 0)):
        os.kill(os.getpid(), signal.SIGKILL)


def free_bytes(self: DeviceMoves) -> float:
    """Return nothing while a producer is there: it may have loaded its engine and not have joined yet."""
    return math.inf if _gpu.is_free() else 0.0


def out(self: DeviceMoves) -> None:
    _out(self)
    _gpu.go()


def step(self: SlipstreamTrainer, *arguments: Any) -> Any:
    assert _gpu.is_here, "it is not the trainer's turn"
    return _step(self, *arguments)


if __name__ == "__main__":
    DeviceMoves.back, DeviceMoves.out, DeviceMoves.free_bytes = back, out, free_bytes  # type: ignore[method-assign]
    SlipstreamTrainer.training_step = step  # type: ignore[method-assign]
    cli.main()
