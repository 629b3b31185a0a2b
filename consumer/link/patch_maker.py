"""Patches of the weights of snapshots, one after the other: of the checkpoint, or of an anchor that is a patch of the checkpoint.

Guarantee: a patch leads from the checkpoint, or from its anchor, to the weights that were given, bit for bit. Equal weights after
equal ones give equal blobs, also in a process that has gone on from a checkpoint of the run. An anchor was published as a policy
before and has none itself. The host keeps 2 bytes per element for the checkpoint and as many for an anchor. Formats:
`protocol.wire.weight_patch`.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from protocol.errors import ConfigError
from protocol.wire.adapter_blob import Anchor, BlobError
from protocol.wire.patch_streams import PER_WORD, TwoWeights, Words, changes_of, element_sum, patch_between
from protocol.wire.weight_patch import PatchedTensor, WeightPatch, anchor_of, pack, parse

KEPT_FILE = "patches.bin"
"""A checkpoint's part: the bytes of the first patch of the anchor, and the blob of the anchor (empty: there is none)."""
_FIRST_BYTES = struct.Struct("<Q")
MOST_GROWTH = 3
"""A patch that is more than so many times as large as the first one of its anchor is not published. By the growth measured at
three learning rates 500 steps then take a third to a fifth of the bytes; over all of them that is fewer than with 2 or 4."""


class Place(NamedTuple):
    """The elements of a tensor in a buffer, up to the next whole word."""

    start: int
    size: int

    @property
    def words(self) -> slice:
        return slice(self.start // PER_WORD, -(-(self.start + self.size) // PER_WORD))


class Blob(NamedTuple):
    """A packed patch, its sha256, and its anchor."""

    data: bytes
    digest: str
    anchor: Anchor | None


class PatchMaker:
    """Makes patches of the tensors of these shapes, which lie at their places in `loaded`, as the checkpoint has them, and in
    each buffer that follows. `free` takes a buffer that is not needed any more. One thread at a time may use it."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        places: Mapping[str, Place],
        loaded: torch.Tensor,
        free: Callable[[torch.Tensor], None],
    ) -> None:
        self._shapes, self._places, self._loaded, self._free = shapes, places, loaded, free
        words = _words(loaded)
        self._sums = {name: element_sum(words[place.words]) for name, place in places.items()}
        self._anchor: Anchor | None = None
        self._before, self._sums_before = loaded, self._sums  # the weights of the anchor, or of the checkpoint
        self._first_bytes = 0  # of the first patch of the anchor; 0: there is none yet

    def patch(self, weights: torch.Tensor) -> WeightPatch:
        """Return the patch that makes `weights` of the checkpoint."""
        return self._patch(self._loaded, self._sums, weights)

    def blob(self, weights: torch.Tensor) -> Blob:
        """Make the patch of the present anchor or, where that is too far away by now, of the checkpoint; that patch is the anchor
        from here on. The buffer is freed, or kept with the anchor."""
        made = self._blob(weights)
        if self._before is not weights:
            self._free(weights)
        return made

    def save(self, folder: Path) -> None:
        """Write to a checkpoint the anchor of the patches to come."""
        with (folder / KEPT_FILE).open("wb") as file:
            file.write(_FIRST_BYTES.pack(self._first_bytes))
            file.write(self._anchor.data if self._anchor else b"")

    def restore(self, folder: Path, buffer: Callable[[], torch.Tensor]) -> None:
        """Go on as `save` has left it; an anchor takes a new buffer. Raises ConfigError if the file is not of these weights."""
        try:
            kept = (folder / KEPT_FILE).read_bytes()
            [first_bytes] = _FIRST_BYTES.unpack_from(kept)
            if anchor := kept[_FIRST_BYTES.size :]:
                self._restore_anchor(anchor, buffer().copy_(self._loaded))
            self._first_bytes = first_bytes
        except (OSError, struct.error, BlobError) as error:
            raise ConfigError(f"run_dir: {folder / KEPT_FILE} cannot be used: {error}") from error

    def _restore_anchor(self, data: bytes, weights: torch.Tensor) -> None:
        if anchor_of(data):
            raise BlobError("the anchor has an anchor itself")
        patch = parse(data, self._shapes)
        elements = weights.view(torch.int16).numpy().view(np.uint16)
        for tensor, places, bits in changes_of(patch):
            place = self._places[tensor.name]
            elements[place.start : place.start + place.size][places] ^= bits
            if element_sum(_words(weights)[place.words]) != tensor.sum:
                raise BlobError(f"it is of other weights than those of model.path ({tensor.name})")
        self._anchor_to(Anchor(hashlib.sha256(data).hexdigest(), data), patch.tensors, weights)

    def _blob(self, weights: torch.Tensor) -> Blob:
        anchor = self._anchor
        patch = self._patch(self._before, self._sums_before, weights)
        if not patch.tensors:
            return Blob(*pack(patch), None) if anchor is None else Blob(bytes(anchor.data), anchor.digest, None)
        data, digest = pack(patch._replace(anchor=anchor.digest if anchor else ""))
        self._first_bytes = self._first_bytes or len(data)
        if len(data) <= MOST_GROWTH * self._first_bytes:
            return Blob(data, digest, anchor)
        if anchor:
            patch = self.patch(weights)
            data, digest = pack(patch)
        self._anchor_to(Anchor(digest, data), patch.tensors, weights)
        return Blob(data, digest, None)

    def _anchor_to(self, anchor: Anchor, tensors: list[PatchedTensor], weights: torch.Tensor) -> None:
        if self._before is not self._loaded:
            self._free(self._before)
        self._anchor, self._before, self._first_bytes = anchor, weights, 0
        self._sums_before = self._sums | {tensor.name: tensor.sum for tensor in tensors}

    def _patch(self, before: torch.Tensor, sums: Mapping[str, int], after: torch.Tensor) -> WeightPatch:
        old, new = _words(before), _words(after)
        return patch_between(
            TwoWeights(name, self._shapes[name], old[place.words], new[place.words], sums[name])
            for name, place in self._places.items()
        )


def _words(buffer: torch.Tensor) -> Words:
    words: Words = buffer.view(torch.int64).numpy().view(np.uint64)
    return words
