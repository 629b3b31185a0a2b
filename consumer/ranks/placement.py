"""The ranks of a trainer, and their hosts and GPUs."""

import os
from dataclasses import dataclass
from importlib.metadata import version

from protocol.errors import ConfigError

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Nodes:
    """The hosts of one trainer.

    Args:
        rank: of this host; 0 has the trainer, the others only ranks.
        host: address of host 0, at which the others find it.
        port: 0 for any, if there is one host.
    """

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of(cls, count: int, rank: int, rendezvous: str | None) -> "Nodes":
        """
        Args:
            rendezvous: HOST:PORT of host 0.

        Raises:
            ConfigError: they contradict each other.
        """
        if count == 1 and rank == 0 and rendezvous is None:
            return cls()
        if not 0 <= rank < count:
            raise ConfigError(f"--node-rank {rank}: --nodes {count} have the numbers 0 to {count - 1}")
        host, _, port = (rendezvous or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"--rendezvous {rendezvous}: several nodes need the same HOST:PORT on all, an address of node 0 and a free port "
                "there, such as 10.0.0.5:5600"
            )
        return cls(count, rank, host.strip("[]"), int(port))


@dataclass(frozen=True)
class Placement:
    """The ranks of one trainer on this host.

    Args:
        gpus: one per rank, as nvidia-smi counts; empty: the CPU.
        num_ranks: on this host.
    """

    gpus: tuple[int, ...]
    num_ranks: int
    nodes: Nodes = Nodes()

    @property
    def is_alone(self) -> bool:
        """True if the trainer is one process."""
        return self.num_ranks == self.nodes.count == 1

    @classmethod
    def of(cls, gpus: list[int], num_ranks: int | None, nodes: Nodes) -> "Placement":
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
        return cls(tuple(gpus), num_ranks or max(1, len(gpus)), nodes)

    def environment(self, index: int) -> dict[str, str]:
        """Return the environment that a process needs before it imports torch, by its number on this host."""
        found = {}
        if self.gpus:
            found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(self.gpus[index])}
            if not self.is_alone:
                # NCCL would end the process for a lost rank before `consumer.ranks.presence` can say which.
                found |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
            found |= _without_rounding()
        if self.num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            found |= {"OMP_NUM_THREADS": str(max(1, (len(os.sched_getaffinity(0)) - 1) // self.num_ranks))}
        return found


def _without_rounding() -> dict[str, str]:
    """Have torch pin as much host memory as is asked for. Otherwise it takes the next power of two, up to twice as much. What a
    user sets stays; torch 2.11 and 2.12 may not know the option, and end with an option that they do not know."""
    if any(name in os.environ for name in _ALLOCATOR) or tuple(map(int, version("torch").split(".")[:2])) < (2, 13):
        return {}
    return {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}
