"""Whether all ranks still have the same weights.

Guarantee: of two ranks whose trained weights differ in one number, every rank hears at the next check, and all end.
"""

from collections.abc import Mapping

import torch

from consumer.ranks.exchange import Ranks
from protocol.errors import RankLostError

CHECK_EVERY = 16  # optimizer steps

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as a number of so many bytes
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
