"""What counts as waiting for other ranks, and what is said of each of them."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from prometheus_client import CollectorRegistry

from consumer.ranks import exchange
from consumer.ranks.exchange import ProcessRanks
from consumer.report.metrics import watch_ranks


class Gpu:
    """A device that does what it is given later, and a clock that stands still meanwhile."""

    def __init__(self, own_work_s: float, sum_s: float) -> None:
        self.now = 0.0
        self._pending_s = own_work_s
        self._sum_s = sum_s

    def all_reduce(self, tensor: torch.Tensor, group: object) -> None:
        self._pending_s += self._sum_s

    def synchronize(self, device: torch.device) -> None:
        self.now += self._pending_s
        self._pending_s = 0.0


def test_waiting_on_a_gpu_is_the_time_until_the_sum_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the time that the rank's own passes still take."""
    gpu = Gpu(own_work_s=5.0, sum_s=3.0)
    monkeypatch.setattr(dist, "all_reduce", gpu.all_reduce)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: gpu.now))
    ranks = ProcessRanks.__new__(ProcessRanks)
    ranks._device, ranks._gradients, ranks.waited_s = torch.device("cuda"), None, 0.0
    ranks.add([torch.ones(3)])
    assert ranks.waited_s == 3.0
    assert gpu.now == 8.0


def test_the_memory_of_a_rank_is_said_to_be_that_of_one_step() -> None:
    """Its peak is reset when a step begins, because the next passes are cut by what these took."""
    registry = CollectorRegistry()
    watch_ranks(registry, [])
    [found] = [family for family in registry.collect() if family.name == "rl_trainer_rank_memory_bytes"]
    assert "last step" in found.documentation
