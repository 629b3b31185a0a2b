"""A patch of weights is read as it was written, or not at all, and no more of it is inflated than its header allows."""

import hashlib
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import igzip_lib

from protocol.wire import adapter_blob, weight_patch
from protocol.wire.adapter_blob import Anchor, BlobError
from protocol.wire.weight_patch import ANCHOR_FILE, FILE, PatchedTensor, WeightPatch, pack, parse, read, unpack

# Elements 1 and 4 of six; the XOR of the first is 0x0180, of the second 0x8000.
TENSOR = PatchedTensor("a.weight", [2, 3], 2, 2, 77)
STREAMS = [b"\x01\x02", b"\x00\x00", b"\x80\x00", b"\x01\x80"]
PATCH = WeightPatch("", [TENSOR], STREAMS)


def blob(tensors: list[Any], streams: list[bytes], **fields: Any) -> bytes:
    return in_pieces(tensors, [[igzip_lib.compress(each)] for each in streams], **fields)


def in_pieces(tensors: list[Any], streams: list[list[bytes]], **fields: Any) -> bytes:
    data: bytes = msgpack.packb({"anchor": "", "tensors": tensors, "streams": streams} | fields)
    return data


def test_a_patch_by_hand() -> None:
    data, digest = pack(PATCH)
    assert digest == hashlib.sha256(data).hexdigest()
    raw = msgpack.unpackb(data)
    assert list(raw) == ["anchor", "tensors", "streams"]
    assert raw["tensors"] == [["a.weight", [2, 3], 2, 2, 77]]
    assert [[zlib.decompress(piece, -15) for piece in each] for each in raw["streams"]] == [[each] for each in STREAMS]
    assert parse(data) == PATCH
    assert parse(blob([["a.weight", [2, 3], 2, 2, 77]], STREAMS)) == PATCH


@settings(max_examples=12)
@given(st.lists(st.binary(max_size=300), min_size=2, max_size=2), st.text(max_size=20))
def test_equal_patches_are_equal_blobs_that_are_read_as_they_were_written(parts: list[bytes], name: str) -> None:
    gaps, bits = parts[0][: len(parts[1])], parts[1]
    size = len(gaps) + len(bits)
    tensors = [PatchedTensor(name, [size], len(bits), len(gaps), 0), PatchedTensor(f"{name}2", [size], 0, 0, 5)]
    patch = WeightPatch("f" * 64, tensors, [gaps, gaps[::-1], bits, bits[::-1]])
    data, digest = pack(patch)
    assert parse(data) == patch
    assert pack(parse(data)) == (data, digest)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3])
def test_a_long_stream_is_deflated_in_pieces(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(weight_patch, "_PIECE_BYTES", piece_bytes)
    tensor = PatchedTensor("a", [9], 3, 0, 5)
    patch = WeightPatch("", [tensor], [b"", b"", b"abc", b"def"])
    data, _ = pack(patch)
    pieces = {1: [[b"a", b"b", b"c"], [b"d", b"e", b"f"]], 2: [[b"ab", b"c"], [b"de", b"f"]], 3: [[b"abc"], [b"def"]]}
    streams = msgpack.unpackb(data)["streams"]
    assert [[zlib.decompress(piece, -15) for piece in each] for each in streams] == [[], [], *pieces[piece_bytes]]
    assert parse(data) == patch
    for wrong in ([*streams[:3], streams[3][1:]], [*streams[:3], [*streams[3], igzip_lib.compress(b"")]]):
        with pytest.raises(BlobError):
            parse(in_pieces([["a", [9], 3, 0, 5]], wrong))


def test_a_folder_has_the_patch_whole_and_is_read_by_its_checksum(tmp_path: Path) -> None:
    data, digest = pack(PATCH)
    checksum = unpack(data, digest, tmp_path / "v1")
    assert checksum == zlib.crc32(data)
    assert os.listdir(tmp_path) == ["v1"]
    assert read(tmp_path / "v1", checksum) == read(tmp_path / "v1", None) == [PATCH]
    with pytest.raises(FileExistsError):
        unpack(data, digest, tmp_path / "v1")
    file = tmp_path / "v1" / FILE
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BlobError, match=f"not {checksum}"):
        read(tmp_path / "v1", checksum)


def anchored(anchor: bytes) -> tuple[bytes, Anchor]:
    """Return a patch of another one, which is given, and that as its anchor."""
    digest = hashlib.sha256(anchor).hexdigest()
    return pack(PATCH._replace(anchor=digest))[0], Anchor(digest, anchor)


def test_a_folder_has_a_patch_and_its_anchor_in_the_order_in_which_they_apply(tmp_path: Path) -> None:
    first = WeightPatch("", [PatchedTensor("b", [1], 1, 1, 9)], [b"\0", b"\0", b"\1", b"\2"])
    below, _ = pack(first)
    data, anchor = anchored(below)
    checksum = unpack(data, None, tmp_path / "v2", anchor)
    assert checksum == zlib.crc32(below + data)
    assert (
        read(tmp_path / "v2", checksum) == read(tmp_path / "v2", None) == [first, PATCH._replace(anchor=anchor.digest)]
    )
    with pytest.raises(BlobError, match=r"no b of shape \[1\]"):
        read(tmp_path / "v2", checksum, {"a.weight": (2, 3)})
    file = tmp_path / "v2" / ANCHOR_FILE
    for wrong in (below[:-1] + bytes([below[-1] ^ 1]), pack(PATCH)[0], b""):
        file.write_bytes(wrong)
        with pytest.raises(BlobError, match="CRC-32"):
            read(tmp_path / "v2", checksum)
        with pytest.raises(BlobError, match="checksum"):
            read(tmp_path / "v2", None)
    file.unlink()
    with pytest.raises(BlobError, match="checksum"):
        read(tmp_path / "v2", None)


def test_an_anchor_that_is_another_one_or_missing_or_has_one_itself_writes_nothing(tmp_path: Path) -> None:
    below, _ = pack(PATCH)
    data, anchor = anchored(below)
    other, _ = pack(WeightPatch("", [], [b""] * 4))
    again, second = anchored(data)
    refused: list[tuple[bytes, Anchor | None, str]] = [
        (data, None, "no anchor was offered"),
        (data, Anchor(hashlib.sha256(other).hexdigest(), other), f"builds on {anchor.digest[:12]}"),
        (data, Anchor(anchor.digest, other), "checksum"),
        (below, anchor, "builds on the checkpoint"),
        (again, second, "has an anchor itself"),
        (b"\x80", None, "not a patch"),
        (*anchored(b"no patch"), "not a patch"),
    ]
    for blob_, offered, problem in refused:
        with pytest.raises(BlobError, match=problem):
            unpack(blob_, None, tmp_path / "v1", offered)
        assert os.listdir(tmp_path) == []
    with pytest.raises(BlobError, match="an adapter builds on no other"):
        adapter_blob.unpack(b"", None, tmp_path / "v1", anchor)
    unpack(data, None, tmp_path / "v1", anchor)
    (tmp_path / "v1" / FILE).write_bytes(again)
    (tmp_path / "v1" / ANCHOR_FILE).write_bytes(data)
    with pytest.raises(BlobError, match="has an anchor itself"):
        read(tmp_path / "v1", None)


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"", lambda d: d[:9] + b"x" + d[10:]]
)
def test_damaged_bytes_write_nothing(tmp_path: Path, damage: Any) -> None:
    data, digest = pack(PATCH)
    with pytest.raises(BlobError, match="checksum"):
        unpack(damage(data), digest, tmp_path / "v1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb([]),
        blob([["a", [2, 3], 2, 2, 77]], STREAMS, more=1),
        blob([["a", [2, 3], 2, 2]], STREAMS),
        blob([["a", [2, -3], 2, 2, 77]], STREAMS),
        blob([["a", [2**41], 2, 2, 77]], STREAMS),
        blob([["a", [2, 3], 2, 2, 77]], STREAMS[:3]),
        blob([["a", [2, 3], 2, 2, 77], ["a", [2, 3], 0, 0, 77]], STREAMS),
        blob([["a", [2, 3], 7, 7, 77]], [bytes(7)] * 4),
        blob([["a", [2, 3], 2, 3, 77]], [bytes(3), bytes(3), *STREAMS[2:]]),
        blob([["a", [2, 3], 1, 2, 77]], STREAMS),
        blob([["a", [2, 3], 3, 3, 77]], STREAMS),
        blob([["a", [2, 3], 2, 2, 77]], [*STREAMS[:3], STREAMS[3] + b"\0"]),
        in_pieces([["a", [2, 3], 2, 2, 77]], [[b"no deflate"]] * 4),
        in_pieces([["a", [2, 3], 2, 2, 77]], [[b""]] * 4),
        in_pieces([["a", [2, 3], 2, 2, 77]], [[]] * 4),
        in_pieces([["a", [2, 3], 0, 0, 77]], [[igzip_lib.compress(b"")], [], [], []]),
    ],
)  # fmt: skip
def test_what_is_no_patch_or_says_other_counts_than_it_has_is_refused(data: bytes) -> None:
    with pytest.raises(BlobError):
        parse(data)


@pytest.mark.parametrize(
    "shapes", [{}, {"b": (2, 3)}, {"a.weight": (3, 2)}, {"a.weight": (6,)}, {"a.weight": (2, 3, 1)}, {"a.weight": ()}]
)
def test_a_patch_of_other_tensors_is_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    data, _ = pack(PATCH)
    with pytest.raises(BlobError, match=r"no a\.weight of shape \[2, 3\]"):
        parse(data, shapes)
    assert parse(data, {"a.weight": (2, 3), "b": ()}) == PATCH
    scalar, _ = pack(WeightPatch("", [PatchedTensor("c", [], 0, 0, 0)], [b""] * 4))
    with pytest.raises(BlobError, match="no c of shape"):
        parse(scalar, shapes)


def test_a_bomb_is_inflated_no_further_than_its_header_says() -> None:
    bomb = [[igzip_lib.compress(bytes(2**26))]] * 4
    header = {"anchor": "", "tensors": [["a", [2, 3], 2, 2, 77]], "streams": bomb}
    data = msgpack.packb(header)
    tracemalloc.start()
    try:
        with pytest.raises(BlobError, match="longer"):
            parse(data)
        large = msgpack.packb(header | {"tensors": [["a", [2**26], 2**26, 2**26, 77]]})
        with pytest.raises(BlobError, match="no a of shape"):
            parse(large, {"a": (2, 3)})
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
