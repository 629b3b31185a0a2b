"""`rl-trainer` of several ranks that fail on demand. All else is real.

Guarantee: as soon as the folder that `FAILURES` names has a file with the number of a rank, that rank raises in its next pass
with gradients the error of `ERRORS` that the file names, or removes the file and stands still. The other ranks are forks of this
process, so that they start at once.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from campaigns.chaos.forked_ranks import forked_ranks
from consumer.app import cli

ERRORS = {
    "gpu memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "memory": MemoryError("no room for the activations"),
    "fault": ZeroDivisionError("a fault of this rank alone"),
}

STANDS_STILL = "stands still"


def _fail_on_demand(folder: Path) -> None:
    original = Qwen2Model.forward

    def forward(self: Qwen2Model, *args: Any, **kwargs: Any) -> Any:
        demand = folder / str(dist.get_rank() if dist.is_initialized() else 0)
        if torch.is_grad_enabled() and demand.exists():
            if demand.read_text() == STANDS_STILL:
                demand.unlink()
                while True:  # a signal that another thread receives wakes no sleep
                    time.sleep(0.05)
            raise ERRORS[demand.read_text()]
        return original(self, *args, **kwargs)

    Qwen2Model.forward = forward


if __name__ == "__main__":
    _fail_on_demand(Path(os.environ["FAILURES"]))
    forked_ranks(sys.argv)
    cli.main()
