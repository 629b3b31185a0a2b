"""What ranks say to one another within an optimizer step.

Guarantee: all ranks get the same numbers, bit for bit; nothing but numbers travels.
"""

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from consumer.ranks.plan import Plan, decode, encode


class Ranks(Protocol):
    """The processes of a trainer. Every method is called by all of them, in the same order.

    Attributes:
        waited_s: time spent in `gather` and `add`, so far.
    """

    waited_s: float

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def mesh(self) -> DeviceMesh:
        """The devices that the ranks compute on, in their order. A trainer that is one process has none."""
        ...

    def gather(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of each name what all ranks have, rank by rank.

        Args:
            values: (N,) each, by names that are the same on all ranks; N may differ. True and false come back as 1 and 0.
        """
        ...

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each by its sum over all ranks. Their shapes, dtypes and devices are the same everywhere."""
        ...

    def share(self, plan: Plan | None) -> Plan:
        """What rank 0 has planned; the others pass None, and wait for it as long as it takes."""
        ...


class OneRank:
    """A trainer that is one process."""

    rank, world = 0, 1
    waited_s = 0.0

    @property
    def mesh(self) -> DeviceMesh:
        raise AssertionError("one rank shares nothing with others")

    def gather(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(values)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def share(self, plan: Plan | None) -> Plan:
        assert plan is not None
        return plan


ALONE: Ranks = OneRank()


class ProcessRanks:
    """Processes connected by torch.distributed.

    Args:
        device: gradients are summed over NCCL where they are on a GPU. Everything else goes over gloo.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.waited_s = 0.0
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        self._gradients = dist.new_group(backend="nccl", timeout=timeout) if device.type == "cuda" else dist.group.WORLD
        self._device = device
        self.mesh = DeviceMesh.from_group(self._gradients, device.type)

    def gather(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat = torch.cat([value.double().flatten() for value in values.values()]).cpu()
        began = time.monotonic()
        lengths = self._from_each(torch.tensor([len(value) for value in values.values()]))
        widths = [int(each.sum()) for each in lengths]
        padded = torch.nn.functional.pad(flat, (0, max(widths) - len(flat)))
        parts = [
            whole[:width].split(each.tolist())
            for whole, width, each in zip(self._from_each(padded), widths, lengths, strict=True)
        ]
        self.waited_s += time.monotonic() - began
        return {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(values)}

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self._finish()  # what this rank has computed, which is no waiting
        began = time.monotonic()
        dist.all_reduce(flat, group=self._gradients)
        self._finish()
        self.waited_s += time.monotonic() - began
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def _finish(self) -> None:
        """Wait until the GPU has done what it was given: NCCL returns before anything was sent."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def share(self, plan: Plan | None) -> Plan:
        data = encode(plan) if plan is not None else b""
        size = torch.tensor(len(data))
        dist.broadcast(size, 0)
        frame = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(frame, 0)
        return plan if plan is not None else decode(frame.numpy().tobytes())

    def _from_each(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(found, tensor)
        return found
