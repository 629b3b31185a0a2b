"""Where the base of a trainer is loaded, and what an error of that means.

Guarantee: a base is loaded as a whole: to the GPU of a trainer with one rank, or to host memory, from where several ranks share
it and a trainer fetches it in its turn. A base that does not fit is refused with its size, and no part of it is offloaded.
Neither a device without memory nor a lost rank is taken for a wrong configuration.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from consumer.ranks.presence import is_broken_connection
from consumer.training.memory import is_out_of_memory, num_refusals, room_of_gpu
from protocol.config.learning import GpuSharing
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError, is_device_failure
from protocol.gpu.memory import base_of, gib

MORE_ROOM = (
    "set model.quantization: nf4, let several GPUs share a base that is not quantized (--gpu 0,1 and pipeline.shard_base: auto), "
    "or take a GPU with more memory"
)
REFUSALS = (ValueError, TypeError, NotImplementedError, ImportError, RuntimeError)
"""Errors with which TRL, PEFT and transformers refuse to build a trainer or to load weights."""


def device_map(gpu: GpuSharing, *, on_gpu: bool, num_ranks: int = 1) -> dict[str, int] | None:
    """Choose the place for `from_pretrained`: the one GPU that this process sees, or host memory (None).

    TRL's own choice on a GPU is `auto`, which offloads what does not fit and leaves ranks nothing to share.
    """
    return {"": 0} if on_gpu and num_ranks == 1 and gpu != "turns" else None


def check_room(config: RunConfig, folder: Path, num_ranks: int) -> None:
    """Refuse a base that each rank would have as a whole on a GPU with less room. In turns the room is looked for at each turn.

    Raises:
        DeviceError: the GPU has less room than the base takes.
    """
    if config.pipeline.gpu == "turns" or (num_ranks > 1 and config.pipeline.shard_base != "none"):
        return
    check_base_fits(base_of(folder, config.model.dtype, config.model.quantization), MORE_ROOM)


def check_base_fits(base: int, fix: str) -> None:
    """Refuse a base of so many bytes if the GPU has less room."""
    room, total = room_of_gpu(torch.device("cuda"))
    if base > room:
        raise DeviceError(
            f"model.path: the base takes {gib(base)} of a GPU that has {gib(room)} of {gib(total)} left (nvidia-smi shows what "
            f"else is on it); {fix}"
        )


@contextlib.contextmanager
def loading(refused: str, fix: str = MORE_ROOM) -> Iterator[None]:
    """Surround the calls by which TRL, PEFT and transformers build a trainer and load weights.

    Args:
        refused: begins the message when one of them refuses.
        fix: ends the message when the device has no memory.

    Raises:
        DeviceError: the device has no memory for the weights, or failed.
        ConfigError: a library refused.
    """
    before = num_refusals()
    try:
        yield
    except REFUSALS as error:
        if is_broken_connection(error):
            raise
        # transformers turns an error of a conversion, such as a quantization, into one without a kind.
        if is_out_of_memory(error) or num_refusals() > before:
            raise DeviceError(f"the trainer's device has no memory for the model: {error}; {fix}") from error
        if is_device_failure(error):
            raise DeviceError(
                f"the GPU failed while the model was loaded: {error}; nvidia-smi shows its state"
            ) from error
        raise ConfigError(f"{refused}: {error}") from error
