"""The device during a step: its memory, and the random numbers that it draws.

Guarantee: where the device of one rank has no memory for a pass, all ranks end it at the same place. So they can try it again
together. A step that is tried again draws the same random numbers.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from accelerate.utils.memory import should_reduce_batch_size

from consumer.learn.micro_batches import MOST_TOKENS
from consumer.ranks.exchange import Ranks
from protocol import errors
from protocol.config.learning import FIRST_TOKENS

USED_SHARE = 0.8  # of the free memory; the rest is for other shapes and fragmentation
_ROUNDED_TO = 1024  # tokens
_WORTH_MEASURING = FIRST_TOKENS // 2  # in smaller passes the part that does not grow with the tokens counts too much


class OutOfMemory(Exception):  # noqa: N818  the trainer decides what follows
    """The device of a rank has no memory for a pass of this step."""


class PassSize(NamedTuple):
    """The size of a forward pass."""

    places: int  # padding included
    tokens: int


@contextlib.contextmanager
def oom_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Surround passes in which ranks exchange nothing: if one rank runs out of memory, all of them raise.

    Raises:
        OutOfMemory: on all ranks; the device of one had no memory for a pass.
    """
    problem = ""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        problem = str(error).partition("\n")[0]
    refused = ranks.gather({"refused": torch.tensor([bool(problem)])})["refused"]
    if refused.any():
        raise OutOfMemory(problem or f"on rank {int(refused.nonzero()[0])}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the host, had no memory."""
    return errors.is_out_of_memory(error) or bool(should_reduce_batch_size(error))


def num_refusals() -> int:
    """Count how often the GPU of this process has had no memory for a tensor; 0 where it has none."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0)) if torch.cuda.is_initialized() else 0


def room_of_gpu(device: torch.device) -> tuple[int, int]:
    """Return the bytes that torch can still give out on this GPU, and those of the whole GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index  # accelerate's device has none
    reserved, allocated = torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)
    free, total = torch.cuda.mem_get_info(index)
    limit = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return allocatable_bytes(free, reserved, allocated, limit), total


class PassMemory:
    """The memory that the passes of a step take of a GPU; on a CPU it is unknown."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def fitting_tokens(self, largest: int) -> int | None:
        """Return the tokens of the largest pass that there is room for now; None if none was large enough to tell.

        Args:
            largest: tokens of the largest pass that was made, padding included.
        """
        if self._device is None or largest < _WORTH_MEASURING:
            return None
        taken = torch.cuda.max_memory_allocated(self._device) - self._before
        room, _ = room_of_gpu(self._device)
        return tokens_within(room, taken, largest)


def allocatable_bytes(free: int, reserved: int, allocated: int, limit: int) -> int:
    """Return the bytes that torch can still give out.

    Args:
        free: on the GPU.
        reserved: that torch has taken from it, used or not.
        allocated: of these, in use.
        limit: bytes that torch may reserve (`pipeline.gpu: shared`).
    """
    return reserved - allocated + max(0, min(free, limit - reserved))


def tokens_within(free_bytes: int, taken_bytes: int, taken_tokens: int) -> int:
    """Return the tokens of a pass that `free_bytes` are enough for, when one of `taken_tokens` took `taken_bytes`; a multiple of
    1024."""
    fitting = int(USED_SHARE * free_bytes * taken_tokens / max(1, taken_bytes))
    return max(_ROUNDED_TO, min(MOST_TOKENS, fitting) // _ROUNDED_TO * _ROUNDED_TO)


def random_state(device: torch.device) -> bytes:
    """Return the state of the generator that draws on this device."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return bytes(state.numpy())


def set_random_state(device: torch.device, state: bytes) -> None:
    """Set the generator's state, unless it is that of another kind of device."""
    if len(state) != len(random_state(device)):
        return
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensor, device)
    else:
        torch.set_rng_state(tensor)
