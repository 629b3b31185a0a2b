"""What each rank did in the last step, for people who ask why a step takes long.

Guarantee: rank 0 knows the numbers of all ranks after every step, at the cost of four numbers per rank.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from prometheus_client import CollectorRegistry

from consumer.ranks.exchange import Ranks
from protocol.runtime.metrics import Readings
from protocol.runtime.processes import resident_bytes


class RankWork(NamedTuple):
    """One rank's part of a step. Memory is the most that tensors took of its GPU in the passes of the step; on a CPU it is that
    of the process."""

    step_s: float
    waited_s: float  # of it, for other ranks and the network
    num_tokens: int  # padding left out
    memory_bytes: int


_SHOWN = {
    "step_s": ("step_seconds", "Duration of the last step on each rank, of a trainer of several."),
    "waited_s": ("waiting_seconds", "Time of the last step in which each rank waited for others and the network."),
    "num_tokens": ("tokens", "Tokens of the last step that went through the model on each rank, without padding."),
    "memory_bytes": (
        "memory_bytes",
        "Most memory that tensors took of each rank's GPU in the passes of the last step; on a CPU that of the process.",
    ),
}


def work_of_all(ranks: Ranks, step_s: float, waited_s: float, num_tokens: int) -> list[RankWork]:
    """Of all ranks, by number. Is called by all of them."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    memory = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes(os.getpid())
    own = torch.tensor([step_s, waited_s, num_tokens, memory], dtype=torch.float64)
    found = ranks.gather({"work": own})["work"].view(ranks.world, -1).tolist()
    return [RankWork(step, waited, int(tokens), int(memory)) for step, waited, tokens, memory in found]


def watch_ranks(registry: CollectorRegistry, works: Sequence[RankWork]) -> None:
    """
    Args:
        works: of the last step, by rank; empty for a trainer that is one process.
    """
    readings = Readings(registry)
    for field, (name, text) in _SHOWN.items():
        readings.gauges(
            f"rl_trainer_rank_{name}", text, "rank",
            lambda field=field: {str(rank): getattr(work, field) for rank, work in enumerate(works)},  # type: ignore[misc]
        )  # fmt: skip
