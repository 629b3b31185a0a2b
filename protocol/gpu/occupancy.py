"""Which GPUs a daemon uses, what is free on them, and which processes use the rest.

Guarantee: two processes that use the same GPU name the same id for it, from whatever container. A driver that does not answer is
no error: then ids are of host and index, and memory is not known.
"""

import socket
from collections.abc import Sequence

from protocol.gpu.device import gpu_facts


def gpu_ids(gpus: Sequence[int]) -> list[str]:
    """Of the GPUs with these indexes, as nvidia-smi counts; without any, of this host's CPU."""
    host = socket.gethostname()[:64]
    if not gpus:
        return [f"cpu of {host}"]
    return [facts.uuid if (facts := gpu_facts(gpu)) else f"gpu {gpu} of {host}" for gpu in gpus]


def free_bytes(gpus: Sequence[int]) -> int | None:
    """On the fullest of these GPUs; None without a GPU, or where the driver does not say."""
    found = [gpu_facts(gpu) for gpu in gpus]
    return min((facts.free_bytes for facts in found if facts is not None), default=None)


def users(gpus: Sequence[int]) -> dict[int, int]:
    """Bytes that processes use on these GPUs, by their ids, as far as the driver says: in a container it may not."""
    found: dict[int, int] = {}
    try:
        import pynvml

        for gpu in gpus:
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(gpu)):
                found[process.pid] = found.get(process.pid, 0) + int(process.usedGpuMemory or 0)
    except Exception:
        return found
    return found
