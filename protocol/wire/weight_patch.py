"""Whole weights of a policy as one blob of bytes: which elements of an anchor's tensors differ, and by which bits.

Guarantee: what was unpacked is what was packed, or `BlobError` was raised. No stream is inflated beyond what its header allows.
The folder appears under its final name complete or not at all.

A tensor of `num_changes` changes has that many numbers in each of the streams of bits (low and high bytes of the XOR of
16-bit elements), and `num_gaps` numbers in each of the streams of gaps (low and high bytes). A gap is the number of elements
between a change and the one before it; `GO_ON` stands for as many elements without a change behind them.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from isal import igzip_lib
from isal.isal_zlib import crc32

from protocol.wire.adapter_blob import BlobError, verify, write_files

FILE = "weights.patch"
GO_ON = 65535
_LEVEL = 1  # of deflate: 1/279 of the weights, where zstd has 1/289
_MAX_TENSORS, _MAX_NAME = 100_000, 512

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class PatchedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A tensor of the checkpoint. `sum` is that of its elements after the patch, whose bits are uint16."""

    name: Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
    shape: Annotated[list[_Count], msgspec.Meta(max_length=8)]
    num_changes: _Count
    num_gaps: _Count
    sum: Annotated[int, msgspec.Meta(ge=0, le=2**56)]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`anchor` is the digest of the patch to which this one is to be applied; "": the checkpoint of `model.path` itself."""

    anchor: Annotated[str, msgspec.Meta(max_length=64)]
    tensors: Annotated[list[PatchedTensor], msgspec.Meta(max_length=_MAX_TENSORS)]
    streams: Annotated[list[bytes], msgspec.Meta(min_length=4, max_length=4)]


class WeightPatch(NamedTuple):
    """Changed tensors in the order of their streams: low and high bytes of gaps, low and high bytes of bits."""

    anchor: str
    tensors: list[PatchedTensor]
    streams: Sequence[bytes | bytearray]


def pack(patch: WeightPatch) -> tuple[bytes, str]:
    """Return the blob and its sha256 in hex. Equal patches give equal blobs."""
    streams = [igzip_lib.compress(each, _LEVEL) for each in patch.streams]
    data = msgspec.msgpack.encode(_Patch(patch.anchor, patch.tensors, streams))
    return data, hashlib.sha256(data).hexdigest()


def parse(data: bytes | memoryview, shapes: Mapping[str, Sequence[int]] | None = None) -> WeightPatch:
    """Return the patch in a blob. Raises BlobError, also if a tensor is none of `shapes` (None: any), before it inflates one."""
    try:
        found = msgspec.msgpack.decode(data, type=_Patch)
    except msgspec.DecodeError as error:
        raise BlobError(f"not a patch of weights: {error}") from error
    for each in found.tensors:
        if each.num_changes > each.size or each.num_gaps > each.num_changes + each.size // GO_ON:
            raise BlobError(f"not a patch of weights: {each.name} has more changes than elements")
    _check_names(found.tensors, shapes)
    gaps, changes = (sum(getattr(each, name) for each in found.tensors) for name in ("num_gaps", "num_changes"))
    lengths = (gaps, gaps, changes, changes)
    return WeightPatch(found.anchor, found.tensors, list(map(_inflated, found.streams, lengths)))


def _check_names(tensors: list[PatchedTensor], shapes: Mapping[str, Sequence[int]] | None) -> None:
    if len({each.name for each in tensors}) < len(tensors):
        raise BlobError("not a patch of weights: it has a tensor twice")
    if shapes is None:
        return
    for each in tensors:
        if each.name not in shapes or list(shapes[each.name]) != each.shape:
            raise BlobError(f"the patch is of other weights: the checkpoint has no {each.name} of shape {each.shape}")


def _inflated(stream: bytes, length: int) -> bytes:
    inflater = igzip_lib.IgzipDecompressor()
    try:
        result = inflater.decompress(stream, length + 1)
    except (igzip_lib.IsalError, EOFError) as error:  # type: ignore[misc]
        raise BlobError(f"not a patch of weights: {error}") from error
    if len(result) != length or not inflater.eof:
        raise BlobError("not a patch of weights: a stream is shorter or longer than its header says")
    return result


def unpack(data: bytes | memoryview, digest: str | None, folder: Path) -> int:
    """Write the patch in `data` to `folder`, which must not exist, and return its CRC-32. With `digest` None the caller has
    verified `data` already. Raises `BlobError`."""
    if digest is not None:
        verify(data, digest)
    write_files(folder, {FILE: data})
    return crc32(data)


def read(folder: Path, checksum: int | None, shapes: Mapping[str, Sequence[int]] | None = None) -> WeightPatch:
    """Return the patch that `unpack` wrote to a folder, as `parse` does. Raises BlobError if its file does not have this CRC-32
    (None: any)."""
    data = (folder / FILE).read_bytes()
    if checksum is not None and (found := crc32(data)) != checksum:
        raise BlobError(f"{folder / FILE} is not the patch that was verified: CRC-32 {found}, not {checksum}")
    return parse(data, shapes)
