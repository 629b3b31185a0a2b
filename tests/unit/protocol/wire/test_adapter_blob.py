"""A blob unpacks to exactly the two files that were packed, or to nothing."""

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UNSENDABLE
from protocol.wire.adapter_blob import AdapterBlob, BlobError, pack, parse, unpack

ADAPTER = AdapterBlob(config_json=b'{"r": 8}', safetensors=bytes(range(256)) * 40)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_pack_puts_the_files_behind_each_other_and_names_the_sha256(config: bytes, weights: bytes) -> None:
    data, digest = pack(AdapterBlob(config, weights))
    assert digest == hashlib.sha256(data).hexdigest()
    assert data == len(config).to_bytes(8, "little") + config + weights
    assert parse(data) == AdapterBlob(config, weights)


def test_an_adapter_of_more_than_four_gib_is_a_blob_like_any_other() -> None:
    """No memory is behind the zeros, and nothing is copied."""
    head, size = pack(AdapterBlob(b'{"r": 128}', b""))[0], 2**32 + 10
    with mmap.mmap(-1, len(head) + size) as memory:
        memory[: len(head)] = head
        with memoryview(memory) as whole:
            blob = parse(whole)
            assert (bytes(blob.config_json), len(blob.safetensors)) == (b'{"r": 128}', size)
            for part in blob:
                part.release()


def test_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "v1"
    unpack(*pack(ADAPTER), folder)
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (folder / "adapter_config.json").read_bytes() == ADAPTER.config_json
    assert (folder / "adapter_model.safetensors").read_bytes() == ADAPTER.safetensors
    assert os.listdir(folder.parent) == ["v1"]


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"", lambda d: d[:99] + b"x" + d[100:]]
)
def test_damaged_bytes_write_nothing(tmp_path: Path, damage: Any) -> None:
    data, digest = pack(ADAPTER)
    bad = damage(data)
    with pytest.raises(BlobError) as caught:
        unpack(bad, digest, tmp_path / "v1")
    actual = hashlib.sha256(bad).hexdigest()
    assert str(caught.value) == (
        f"checksum mismatch: announced {digest[:12]}, received {actual[:12]} ({len(bad)} bytes)"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\x01" + 7 * b"\0", b"\x09" + 7 * b"\0" + b"12345678", 8 * b"\xff", 20 * b"\x80"]
)
def test_bytes_that_are_no_adapter_write_nothing_even_with_the_right_checksum(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BlobError, match=r"^not an adapter blob: "):
        unpack(data, hashlib.sha256(data).hexdigest(), tmp_path / "v1")
    assert os.listdir(tmp_path) == []


def test_what_a_full_disk_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, num_written = Path.write_bytes, iter([1, 2])

    def second_fails(path: Path, content: bytes) -> int:
        if next(num_written) == 2:
            raise OSError(28, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", second_fails)
        with pytest.raises(OSError, match="No space left"):
            unpack(*pack(ADAPTER), tmp_path / "v1")
    assert os.listdir(tmp_path) == []


def test_a_version_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "v1"
    unpack(*pack(ADAPTER), folder)
    with pytest.raises(OSError, match="is there already"):
        unpack(*pack(AdapterBlob(b"{}", b"other")), folder)
    assert (folder / "adapter_config.json").read_bytes() == ADAPTER.config_json


def test_bytes_of_four_gib_are_no_bug_of_a_sender() -> None:
    """No memory is behind the zeros."""
    with mmap.mmap(-1, 2**32) as memory, memoryview(memory) as value, pytest.raises(UNSENDABLE):
        msgspec.msgpack.encode({"rewards": value})
