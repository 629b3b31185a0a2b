"""The trainer's part of a GPU that it shares with a producer.

Guarantee: torch takes no more than the share, so that a pass that is too large is an out-of-memory error of the trainer and never
one of the engine. What the base and the passes take is held from the start to the end: the engine measures free memory whenever
a producer starts, and nothing that the trainer does changes it then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from consumer.ranks.placement import Placement
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError
from protocol.gpu.memory import Shares, gib
from protocol.gpu.reservation import reserve_gpu

_SMALL = 2**28  # bytes for tensors of less than a megabyte, which torch's allocator keeps apart from the others
_ANCHOR = 2**22  # bytes


class Device(Protocol):
    """A GPU as torch's allocator sees it."""

    def limit(self, share: float) -> int:
        """Make every allocation fail that would take more than this share of the GPU. Return the limit in bytes."""

    def reserve(self, num_bytes: int) -> object:
        """Take `num_bytes` of the GPU for tensors to come, as long as the result lives. Raises torch.OutOfMemoryError."""


class CudaDevice:
    """The GPU that is visible to this process."""

    def limit(self, share: float) -> int:
        torch.cuda.set_per_process_memory_fraction(share)
        return int(share * torch.cuda.mem_get_info()[1])

    def reserve(self, num_bytes: int) -> object:
        """A freed block stays torch's, and as long as a piece of it is in use no emptying of caches gives any of it back."""
        block = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        del block
        return torch.empty(_ANCHOR, dtype=torch.uint8, device="cuda")


@contextmanager
def gpu_share(
    config: RunConfig, placement: Placement, must_stop: Callable[[], bool], device: Device | None = None
) -> Iterator[object]:
    """Take the share before anything else is on the GPU; what it yields keeps it. Only under `pipeline.gpu: shared` anything is
    limited.

    Args:
        must_stop: ends the wait for a producer that is taking its share; then nothing is taken.

    Raises:
        SlipstreamError: the GPU is to be shared and cannot be.
    """
    mode = config.pipeline.gpu
    if not placement.is_alone and (mode == "turns" or (mode == "shared" and placement.gpus)):
        raise ConfigError(
            f"pipeline.gpu: {mode} is for a trainer of one rank on the producer's GPU, and this one has several (--gpu, --ranks, "
            "--nodes); name one GPU, or give each daemon GPUs of its own (pipeline.gpu: own)"
        )
    with reserve_gpu(config, list(placement.gpus), "trainer") as seat:
        held: object = None
        if seat.shares is not None:
            with seat.exclusive_startup(config.pipeline.stall_timeout_s, must_stop):
                held = None if must_stop() else _take(device or CudaDevice(), seat.shares)
        yield held


def _take(device: Device, shares: Shares) -> object:
    limit = device.limit(shares.trainer / shares.total)
    try:
        return device.reserve(max(_ANCHOR, limit - shares.needs.trained - _SMALL))
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"pipeline.gpu: shared: the GPU refuses the trainer's share of {gib(shares.trainer)}: {error}. End what else is on "
            "it (nvidia-smi shows that)"
        ) from error
