"""The streams of a patch of weights, made from two sets of weights, and the changes in them.

Guarantee: `changes_of` yields what `patch_between` was given, or raises `BlobError`; `composed` does for patches that apply one
after the other. Formats: `protocol.wire.weight_patch`. No other module of the package computes with numpy.
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
_CHUNK = 2**17  # words that are compared at a time, which stay in the cache
_SUMMED = 2**16  # elements, whose sum is below 2**32


class TwoWeights(NamedTuple):
    """A tensor of a checkpoint, before and after; `old_sum` is the `element_sum` before."""

    name: str
    shape: Sequence[int]
    old: Words
    new: Words
    old_sum: int


def patch_between(tensors: Iterable[TwoWeights]) -> WeightPatch:
    """Return the patch of a checkpoint that makes the new weights of the old ones. It names the tensors that differ."""
    patched: list[PatchedTensor] = []
    streams = [bytearray() for _ in range(4)]
    for name, shape, old, new, total in tensors:
        num_changes, num_gaps, last = 0, 0, -1
        for places, bits, change in changes(old, new):
            gaps = gaps_of(places, last)
            num_changes += len(places)
            num_gaps += len(gaps)
            total += change
            last = int(places[-1])
            for stream, numbers in zip(streams, (gaps, gaps >> 8, bits, bits >> 8), strict=True):
                stream += numbers.astype(np.uint8).data
        if num_changes:
            patched.append(PatchedTensor(name, list(shape), num_changes, num_gaps, total))
    return WeightPatch("", patched, streams)


def element_sum(words: Words) -> int:
    """Return the sum of all elements as uint16. numpy adds them in 32 bits in half the time that it takes in 64."""
    elements = words.view(np.uint16)
    return sum(int(elements[at : at + _SUMMED].sum(dtype=np.uint32)) for at in range(0, len(elements), _SUMMED))


def changes(old: Words, new: Words) -> Iterator[tuple[Places, Bits, int]]:
    """Yield which elements differ, in rising order, their bits, XORed, and by how much their sum rises, piece by piece. 0 and -0
    differ."""
    for at in range(0, len(old), _CHUNK):
        before = old[at : at + _CHUNK]
        differences = before ^ new[at : at + _CHUNK]
        words = np.flatnonzero(differences != 0)
        elements = differences[words].view(np.uint16)
        found = np.flatnonzero(elements != 0)
        if len(found):
            bits, places = elements[found], (words[found >> 2] << 2) + (found & 3)
            base = before.view(np.uint16)[places]
            change = int((base ^ bits).sum(dtype=np.int64)) - int(base.sum(dtype=np.int64))
            yield places + at * PER_WORD, bits, change


def gaps_of(places: Places, last: int = -1) -> NDArray[np.uint16]:
    """Return the number of elements between each of these and the one before it, of which the first is `last`; `GO_ON` stands for
    as many without a change."""
    gaps = np.diff(places, prepend=last) - 1
    if not len(gaps) or gaps.max() < GO_ON:
        return gaps.astype(np.uint16)
    repeats = gaps // GO_ON
    result = np.full(int((repeats + 1).sum()), GO_ON, np.uint16)
    result[np.cumsum(repeats + 1) - 1] = gaps % GO_ON
    return result


def composed(patches: Sequence[WeightPatch]) -> Iterable[tuple[PatchedTensor, Places, Bits]]:
    """Return as `changes_of` the changes of patches of which each applies to the weights that the one before it gives. The sum is
    that after the last of them; a tensor whose changes cancel out is named with none. Raises BlobError."""
    found: dict[str, tuple[PatchedTensor, Places, Bits]] = {}
    for patch in patches:
        for tensor, places, bits in changes_of(patch):
            if tensor.name in found:
                _, old_places, old_bits = found[tensor.name]
                places, bits = _merged(np.concatenate([old_places, places]), np.concatenate([old_bits, bits]))
            found[tensor.name] = tensor, places, bits
    return found.values()


def _merged(places: Places, bits: Bits) -> tuple[Places, Bits]:
    """Bring changes into rising order, and XOR those of the same place. Sorting by runs takes what it takes to merge them."""
    order = np.argsort(places, kind="stable")
    places, bits = places[order], bits[order]
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    places, bits = places[starts], np.bitwise_xor.reduceat(bits, starts) if len(starts) else bits
    return places[bits != 0], bits[bits != 0]


def changes_of(patch: WeightPatch) -> Iterator[tuple[PatchedTensor, Places, Bits]]:
    """Yield the tensors with the places of their changes, in rising order, and the XOR of each. Raises BlobError if a place lies
    outside of its tensor."""
    low_gaps, high_gaps, low_bits, high_bits = (np.frombuffer(stream, np.uint8) for stream in patch.streams)
    gaps, bits = (low | high.astype(np.uint16) << 8 for low, high in ((low_gaps, high_gaps), (low_bits, high_bits)))
    for tensor in patch.tensors:
        its_gaps, gaps = np.split(gaps, [tensor.num_gaps])
        its_bits, bits = np.split(bits, [tensor.num_changes])
        goes_on = its_gaps == GO_ON
        places = np.cumsum(np.where(goes_on, GO_ON, its_gaps.astype(np.int64) + 1))[~goes_on] - 1
        if len(places) != tensor.num_changes or (len(places) and places[-1] >= tensor.size):
            raise BlobError(f"the patch of {tensor.name} has places that are not in it")
        yield tensor, places, its_bits
