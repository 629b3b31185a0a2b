"""Whole weights of a policy as one blob of bytes: which elements of an anchor's tensors differ, and by which bits.

Guarantee: what was unpacked is what was packed, or `BlobError` was raised. No stream is inflated beyond what its header allows.
The folder appears under its final name complete or not at all.

A tensor of `num_changes` changes has that many numbers in each of the streams of bits (low and high bytes of the XOR of
16-bit elements), and `num_gaps` numbers in each of the streams of gaps (low and high bytes). A gap is the number of elements
between a change and the one before it; `GO_ON` stands for as many elements without a change behind them.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from isal import igzip_lib
from isal.isal_zlib import crc32

from protocol.wire.adapter_blob import Anchor, BlobError, verify, write_files

FILE, ANCHOR_FILE = "weights.patch", "anchor.patch"
GO_ON = 65535
_LEVEL = 1  # of deflate: 1/279 of the weights, where zstd has 1/289
_PIECE_BYTES = 2**30  # of a stream, each deflated by itself: msgpack has no bytes of 4 GiB
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


class _Header(msgspec.Struct, frozen=True):
    """The part of `_Patch` that names its anchor."""

    anchor: Annotated[str, msgspec.Meta(max_length=64)]


class _Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`anchor` is the digest of the patch to which this one is to be applied; "": the checkpoint of `model.path` itself."""

    anchor: Annotated[str, msgspec.Meta(max_length=64)]
    tensors: Annotated[list[PatchedTensor], msgspec.Meta(max_length=_MAX_TENSORS)]
    streams: Annotated[list[list[bytes]], msgspec.Meta(min_length=4, max_length=4)]  # of pieces


class WeightPatch(NamedTuple):
    """Changed tensors in the order of their streams: low and high bytes of gaps, low and high bytes of bits."""

    anchor: str
    tensors: list[PatchedTensor]
    streams: Sequence[bytes | bytearray]


def pack(patch: WeightPatch) -> tuple[bytes, str]:
    """Return the blob and its sha256 in hex. Equal patches give equal blobs."""
    streams = [[igzip_lib.compress(piece, _LEVEL) for piece in _pieces(stream)] for stream in patch.streams]
    data = msgspec.msgpack.encode(_Patch(patch.anchor, patch.tensors, streams))
    return data, hashlib.sha256(data).hexdigest()


def parse(data: bytes | memoryview, shapes: Mapping[str, Sequence[int]] | None = None) -> WeightPatch:
    """Return the patch in a blob. Raises BlobError, also if a tensor is none of `shapes` (None: any), before it inflates one."""
    try:
        found = msgspec.msgpack.decode(data, type=_Patch)
    except msgspec.DecodeError as error:
        raise BlobError(f"not a patch of weights: {error}") from error
    for tensor in found.tensors:
        if tensor.num_changes > tensor.size or tensor.num_gaps > tensor.num_changes + tensor.size // GO_ON:
            raise BlobError(f"not a patch of weights: {tensor.name} has more changes than elements")
    _check_names(found.tensors, shapes)
    gaps, changes = (sum(getattr(tensor, name) for tensor in found.tensors) for name in ("num_gaps", "num_changes"))
    lengths = (gaps, gaps, changes, changes)
    return WeightPatch(found.anchor, found.tensors, list(map(_inflated, found.streams, lengths)))


def _check_names(tensors: list[PatchedTensor], shapes: Mapping[str, Sequence[int]] | None) -> None:
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise BlobError("not a patch of weights: it has a tensor twice")
    if shapes is None:
        return
    for tensor in tensors:
        if tensor.name not in shapes or list(shapes[tensor.name]) != tensor.shape:
            raise BlobError(
                f"the patch is of other weights: the checkpoint has no {tensor.name} of shape {tensor.shape}"
            )


def _pieces(stream: bytes | bytearray) -> Iterator[memoryview]:
    for at in range(0, len(stream), _PIECE_BYTES):
        yield memoryview(stream)[at : at + _PIECE_BYTES]


def _inflated(pieces: list[bytes], length: int) -> bytes:
    lengths = [min(_PIECE_BYTES, length - at) for at in range(0, length, _PIECE_BYTES)]
    if len(pieces) != len(lengths):
        raise BlobError("not a patch of weights: a stream has more or fewer pieces than its header says")
    return b"".join(map(_inflated_piece, pieces, lengths))


def _inflated_piece(piece: bytes, length: int) -> bytes:
    inflater = igzip_lib.IgzipDecompressor()
    try:
        result = inflater.decompress(piece, length + 1)
    except (igzip_lib.IsalError, EOFError) as error:  # type: ignore[misc]
        raise BlobError(f"not a patch of weights: {error}") from error
    if len(result) != length or not inflater.eof:
        raise BlobError("not a patch of weights: a stream is shorter or longer than its header says")
    return result


def anchor_of(data: bytes | memoryview) -> str:
    """Return the digest of the patch to which the one in a blob is to be applied; "": it has no anchor. Raises BlobError."""
    try:
        return msgspec.msgpack.decode(data, type=_Header).anchor
    except msgspec.DecodeError as error:
        raise BlobError(f"not a patch of weights: {error}") from error


def unpack(data: bytes | memoryview, digest: str | None, folder: Path, anchor: Anchor | None = None) -> int:
    """Write the patch in `data`, and its anchor, to `folder`, which must not exist, and return the CRC-32 of both. With `digest`
    None the caller has verified `data` already. Raises `BlobError`, also if the patch has another anchor, or that has one."""
    if digest is not None:
        verify(data, digest)
    if (named := anchor_of(data)) != (anchor.digest if anchor else ""):
        offered = f"the anchor {anchor.digest[:12]}" if anchor else "no anchor"
        raise BlobError(f"the patch builds on {named[:12] or 'the checkpoint'}, and {offered} was offered with it")
    if anchor is None:
        write_files(folder, {FILE: data})
        return crc32(data)
    verify(anchor.data, anchor.digest)
    _check_is_anchor(anchor.data)
    write_files(folder, {ANCHOR_FILE: anchor.data, FILE: data})
    return crc32(data, crc32(anchor.data))


def _check_is_anchor(data: bytes | memoryview) -> None:
    if other := anchor_of(data):
        raise BlobError(f"the anchor of the patch has an anchor itself ({other[:12]})")


def read(folder: Path, checksum: int | None, shapes: Mapping[str, Sequence[int]] | None = None) -> list[WeightPatch]:
    """Return the patches that `unpack` wrote to a folder, in the order in which they apply to the checkpoint, as `parse` does.
    Raises BlobError if the files do not have this CRC-32 (None: any), or the patch has another anchor."""
    data, file = (folder / FILE).read_bytes(), folder / ANCHOR_FILE
    anchor = file.read_bytes() if file.exists() else b""
    if checksum is not None and (found := crc32(data, crc32(anchor))) != checksum:
        raise BlobError(f"{folder / FILE} is not the patch that was verified: CRC-32 {found}, not {checksum}")
    patch = parse(data, shapes)
    if not patch.anchor and not anchor:
        return [patch]
    verify(anchor, patch.anchor)
    _check_is_anchor(anchor)
    return [parse(anchor, shapes), patch]
