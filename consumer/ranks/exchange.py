"""Messages between ranks: plans of rank 0, and the numbers of an optimizer step.

Guarantee: the other ranks hear of a run before any of its batches, and of every batch before rank 0 trains it. `decode` returns
exactly the plan that was encoded, or raises `PlanError`; a plan holds data only, and groups travel as the messages that they
arrived in. All ranks get the same numbers, bit for bit. Two ranks whose trained weights differ in one number end with all others
at the next check. Rank 0 knows after every step what each rank did in it.
"""

import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from protocol.errors import RankLostError
from protocol.runtime.processes import resident_bytes
from protocol.wire.messages import Group
from replay.batch_selection import TrainingBatch
from replay.groups import GroupShape, message_of

PIECE_BYTES = 2**26


class PlanError(Exception):
    """A message of rank 0 that is no plan."""


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="begin"):
    """The run, and the step that it starts from."""

    num_prompts: int
    vocab_size: int
    step: int  # optimizer steps taken before
    files: dict[str, int]  # of the checkpoint, with their sizes in bytes; empty without one
    trains: bool = True  # False: no step is left


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="piece"):
    """The next piece of the files that `Begin` names, one after another: at most `PIECE_BYTES`, of one file."""

    data: bytes


class Train(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="train"):
    """The order to take the steps over this batch. Fields as of `replay.batch_selection.TrainingBatch`."""

    first_step: int
    num_iterations: int
    last_step: int
    num_fresh: int
    groups: list[Group]
    answers: list[bytes | None] = []
    weights: list[tuple[float, ...]] = []

    @classmethod
    def of(cls, batch: TrainingBatch) -> "Train":
        groups = [message_of(group) for group in batch.groups]
        answers = [None if ids is None else ids.astype("<i4").tobytes() for ids in batch.answers]
        steps = (batch.first_step, batch.num_iterations, batch.last_step)
        return cls(*steps, batch.num_fresh, groups, answers, list(batch.weights))

    def batch(self, shape: GroupShape) -> TrainingBatch:
        groups = [shape.parse(message) for message in self.groups]
        answers = [None if ids is None else np.frombuffer(ids, "<i4") for ids in self.answers]
        return TrainingBatch(
            self.first_step, self.num_iterations, self.last_step, groups, self.num_fresh,
            answers=answers, weights=self.weights,
        )  # fmt: skip


GatheredState = Literal["model", "optimizer"]


class Gather(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gather"):
    """The order to gather weights that ranks share, or the state of their optimizer, for rank 0."""

    what: GatheredState


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step"):
    """The order to take the next step over the batch."""


Plan = Begin | Piece | Train | Gather | Step
_DECODER: msgspec.msgpack.Decoder[Plan] = msgspec.msgpack.Decoder(Plan)


def encode(plan: Plan) -> bytes:
    return msgspec.msgpack.encode(plan)


def decode(data: bytes) -> Plan:
    """
    Raises:
        PlanError: it is none.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise PlanError(f"rank 0 runs another release, or what it said was damaged: {error}") from error


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
        """Return for each name the values of all ranks, rank by rank.

        Args:
            values: (N,) each, by names that are the same on all ranks; N may differ. True and false come back as 1 and 0.
        """
        ...

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each by its sum over all ranks. Their shapes, dtypes and devices are the same everywhere."""
        ...

    def share(self, plan: Plan | None) -> Plan:
        """Return the plan of rank 0. The others pass None, and wait for it as long as it takes."""
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
        widths = [int(length.sum()) for length in lengths]
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


def next_plan(ranks: Ranks, trainer: Any) -> Plan:
    """Return the next plan of rank 0. Until then this rank takes part in what that gathers of the trainer's state."""
    while isinstance(plan := ranks.share(None), Gather):
        getattr(trainer, plan.what).state_dict()
    return plan


def steps_of(batch: TrainingBatch, ranks: Ranks, trainer: Any) -> Iterator[int]:
    """Yield the steps over a batch, on all ranks. Rank 0 orders each but the first, so where it ends the run in between, no rank
    has begun the next one."""
    first = batch.last_step - batch.num_iterations + 1
    for step in range(first, batch.last_step + 1):
        if step > first and ranks.rank == 0:
            ranks.share(Step())
        elif step > first and not isinstance(next_plan(ranks, trainer), Step):
            raise PlanError("rank 0 left a batch before its last step")
        yield step


def begin(
    ranks: Ranks, num_prompts: int, vocab_size: int, step: int, checkpoint: Path | None, *, trains: bool = True
) -> None:
    """Tell the other ranks of the run, and hand them the checkpoint of step `step` that it goes on from.

    Args:
        checkpoint: its folder.
        trains: whether a step is left.
    """
    files = [file for file in checkpoint.iterdir() if file.is_file()] if checkpoint else []
    sizes = {file.name: file.stat().st_size for file in files}
    ranks.share(Begin(num_prompts, vocab_size, step, sizes, trains))
    for file in files:
        with file.open("rb") as stream:
            while data := stream.read(PIECE_BYTES):
                ranks.share(Piece(data))


CHECK_EVERY = 16  # optimizer steps

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
_EXACT = 2**52 - 1  # what a float64, in which numbers travel, holds exactly


def check_agreement(ranks: Ranks, step: int, weights: Mapping[str, torch.Tensor]) -> None:
    """
    Args:
        step: number of steps that were taken.
        weights: those that are trained, by name; the same names on all ranks.

    Raises:
        RankLostError: on all ranks; a rank has other weights than rank 0.
    """
    own = torch.stack([_checksum(tensor) for tensor in weights.values()])
    found = ranks.gather({"checksums": own})["checksums"].view(ranks.world, -1)
    differs = found != found[0]
    if differs.any():
        rank, place = differs.nonzero()[0].tolist()
        raise RankLostError(
            f"after step {step} rank {rank} has other weights than rank 0 ({list(weights)[place]} first), and they must be equal "
            "bit for bit: look for faults of memory and GPU on its host, and for other versions of libraries there; go on with "
            "--resume, where all ranks start from one checkpoint"
        )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """(), int64: the sum of the bits, each number read as an integer."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64) & _EXACT


class RankWork(NamedTuple):
    """A rank's part of a step. Memory is the most that tensors took of its GPU in the passes of the step; on a CPU it is that
    of the process."""

    step_s: float
    waited_s: float  # of it, for other ranks and the network
    num_tokens: int  # padding left out
    memory_bytes: int


def work_of_all(ranks: Ranks, step_s: float, waited_s: float, num_tokens: int) -> list[RankWork]:
    """Return the work of all ranks, by number. All of them call it."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    memory = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes(os.getpid())
    own = torch.tensor([step_s, waited_s, num_tokens, memory], dtype=torch.float64)
    found = ranks.gather({"work": own})["work"].view(ranks.world, -1).tolist()
    return [RankWork(step, waited, int(tokens), int(memory)) for step, waited, tokens, memory in found]
