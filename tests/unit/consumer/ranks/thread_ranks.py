"""Ranks that are threads of one process, for tests of arithmetic.

Guarantee: as of `consumer.ranks.exchange.Ranks`; a rank that raises ends the wait of the others.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from consumer.ranks.exchange import Plan

_Result = TypeVar("_Result")


class _Meeting:
    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=120)
        self.brought: list[Any] = [None] * world


class ThreadRanks:
    waited_s = 0.0

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = len(meeting.brought)
        self._meeting = meeting

    def gather(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = self._all({name: value.detach().double().flatten() for name, value in values.items()})
        assert len({tuple(part) for part in parts}) == 1, "all ranks must have the same names"
        return {name: torch.cat([part[name] for part in parts]) for name in values}

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = self._all([tensor.detach().clone() for tensor in tensors])
        for tensor, *values in zip(tensors, *parts, strict=True):
            tensor.copy_(torch.stack(values).sum(0))

    def share(self, plan: Plan | None) -> Plan:
        found: Plan = self._all(plan)[0]
        return found

    def _all(self, mine: Any) -> list[Any]:
        self._meeting.brought[self.rank] = mine
        self._meeting.barrier.wait()
        found = list(self._meeting.brought)
        self._meeting.barrier.wait()
        return found


def on_ranks(world: int, work: Callable[[ThreadRanks], _Result]) -> list[_Result]:
    """What each rank returns."""
    meeting, results, errors = _Meeting(world), [None] * world, list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, meeting))  # type: ignore[call-overload]
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
