"""The streams of a patch of weights, made from two sets of weights, and the changes in them.

Guarantee: `changes_of` yields what `patch_between` was given, or raises `BlobError`. Formats: `protocol.wire.weight_patch`. No
other module of the package computes with numpy.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.wire.adapter_blob import BlobError
from protocol.wire.weight_patch import GO_ON, PatchedTensor, WeightPatch

Words = NDArray[np.uint64]
"""Elements of 16 bits, four a word; the rest of the last word is zero."""
Places = NDArray[np.int64]
Bits = NDArray[np.uint16]

PER_WORD = 4
_CHUNK = 2**18  # words that are compared at a time, which stay in the cache
_SUMMED = 2**16  # elements, whose sum is below 2**32


class TwoWeights(NamedTuple):
    """A tensor of a checkpoint, before and after."""

    name: str
    shape: Sequence[int]
    old: Words
    new: Words


def patch_between(tensors: Iterable[TwoWeights]) -> WeightPatch:
    """Return the patch of a checkpoint that makes the new weights of the old ones. It names the tensors that differ."""
    patched: list[PatchedTensor] = []
    streams: tuple[list[bytes], ...] = ([], [], [], [])
    for name, shape, old, new in tensors:
        places, bits = changes(old, new)
        if not len(places):
            continue
        gaps = gaps_of(places)
        patched.append(PatchedTensor(name, list(shape), len(places), len(gaps), element_sum(new)))
        for stream, numbers in zip(streams, (gaps & 255, gaps >> 8, bits & 255, bits >> 8), strict=True):
            stream.append(numbers.astype(np.uint8).tobytes())
    return WeightPatch("", patched, [b"".join(stream) for stream in streams])


def element_sum(words: Words) -> int:
    """Return the sum of all elements as uint16. numpy adds them in 32 bits in half the time that it takes in 64."""
    elements = words.view(np.uint16)
    return sum(int(elements[at : at + _SUMMED].sum(dtype=np.uint32)) for at in range(0, len(elements), _SUMMED))


def changes(old: Words, new: Words) -> tuple[Places, Bits]:
    """Return which elements differ, in rising order, and their bits, XORed. 0 and -0 differ."""
    found = [np.flatnonzero(old[at : at + _CHUNK] != new[at : at + _CHUNK]) + at for at in range(0, len(old), _CHUNK)]
    words = np.concatenate(found) if found else np.empty(0, np.int64)
    bits = (old[words] ^ new[words]).view(np.uint16).reshape(-1, PER_WORD)
    row, column = np.nonzero(bits)
    return words[row] * PER_WORD + column, bits[row, column]


def gaps_of(places: Places) -> NDArray[np.uint16]:
    """Return the number of elements between each of these and the one before it; `GO_ON` stands for as many without a change."""
    gaps = np.diff(places, prepend=-1) - 1
    repeats = gaps // GO_ON
    result = np.full(int((repeats + 1).sum()), GO_ON, np.uint16)
    result[np.cumsum(repeats + 1) - 1] = gaps % GO_ON
    return result


def changes_of(patch: WeightPatch) -> Iterator[tuple[PatchedTensor, Places, Bits]]:
    """Yield the tensors with the places of their changes, in rising order, and the XOR of each. Raises BlobError if a place lies
    outside of its tensor."""
    low_gaps, high_gaps, low_bits, high_bits = (np.frombuffer(each, np.uint8) for each in patch.streams)
    gaps, bits = (low | high.astype(np.uint16) << 8 for low, high in ((low_gaps, high_gaps), (low_bits, high_bits)))
    for tensor in patch.tensors:
        its_gaps, gaps = np.split(gaps, [tensor.num_gaps])
        its_bits, bits = np.split(bits, [tensor.num_changes])
        goes_on = its_gaps == GO_ON
        places = np.cumsum(np.where(goes_on, GO_ON, its_gaps.astype(np.int64) + 1))[~goes_on] - 1
        if len(places) != tensor.num_changes or (len(places) and places[-1] >= tensor.size):
            raise BlobError(f"the patch of {tensor.name} has places that are not in it")
        yield tensor, places, its_bits
