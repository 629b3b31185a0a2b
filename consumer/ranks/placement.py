"""Which ranks a trainer has, and where."""

import os
from dataclasses import dataclass

from protocol.errors import ConfigError

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Placement:
    """The ranks of one trainer.

    Args:
        gpus: one per rank, as nvidia-smi counts; empty: the CPU.
        world: number of ranks.
    """

    gpus: tuple[int, ...]
    world: int

    @classmethod
    def of(cls, gpus: list[int], num_ranks: int | None) -> "Placement":
        """
        Args:
            num_ranks: what `--ranks` says; None: one per GPU.

        Raises:
            ConfigError: another launcher started this process, or GPUs and ranks contradict each other.
        """
        foreign = [name for name in _LAUNCHERS if name in os.environ]
        if foreign:
            raise ConfigError(
                f"{foreign[0]} is set in the environment: start rl-trainer without torchrun or accelerate launch; it starts its "
                "ranks itself, one for each GPU that --gpu names"
            )
        if gpus and num_ranks not in (None, len(gpus)):
            raise ConfigError(
                f"--ranks {num_ranks}: --gpu names {len(gpus)} GPUs, and each has one rank; leave --ranks out"
            )
        if num_ranks is not None and num_ranks < 1:
            raise ConfigError(f"--ranks {num_ranks}: give the number of processes that share a step, at least 1")
        return cls(tuple(gpus), num_ranks or max(1, len(gpus)))

    def environment(self, rank: int) -> dict[str, str]:
        """What a process of this rank must find in its environment before it imports torch."""
        if self.gpus:
            return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(self.gpus[rank])}
        if self.world == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, ((os.cpu_count() or 2) - 1) // self.world))}
