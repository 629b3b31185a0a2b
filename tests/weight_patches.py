"""Patches of weights from two sets of them, as a trainer publishes them."""

from collections.abc import Mapping

import numpy as np
import torch

from protocol.wire import patch_streams
from protocol.wire.patch_streams import TwoWeights, element_sum
from protocol.wire.weight_patch import WeightPatch

State = Mapping[str, torch.Tensor]


def words_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of 16-bit elements, four a word; the rest of the last word is zero."""
    bits = tensor.detach().contiguous().view(torch.int16).reshape(-1).numpy().view(np.uint16)
    return np.pad(bits, (0, -len(bits) % 4)).view(np.uint64)


def patch_between(old: State, new: State) -> WeightPatch:
    """Return the patch that makes `new` of `old`, whose tensors are bfloat16."""
    return patch_streams.patch_between(
        TwoWeights(name, list(each.shape), words := words_of(old[name]), words_of(each), element_sum(words))
        for name, each in new.items()
    )
