"""A blob unpacks to exactly the two files that were packed, or to nothing."""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.wire.adapter_blob import AdapterBlob, BlobError, pack, unpack

ADAPTER = AdapterBlob(config_json=b'{"r": 8}', safetensors=bytes(range(256)) * 40)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_pack_is_plain_msgpack_and_names_its_sha256(config: bytes, weights: bytes) -> None:
    data, digest = pack(AdapterBlob(config, weights))
    assert digest == hashlib.sha256(data).hexdigest()
    assert msgpack.unpackb(data) == {"config_json": config, "safetensors": weights}
    assert pack(AdapterBlob(config, weights)) == (data, digest)


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
    "value",
    [
        {},
        {"config_json": b""},
        {"config_json": b"", "safetensors": "text"},
        {"config_json": b"", "safetensors": b"", "../../etc/passwd": b""},
        [b"", b""],
        None,
    ],
)
def test_bytes_that_are_no_adapter_write_nothing_even_with_the_right_checksum(tmp_path: Path, value: object) -> None:
    data = msgpack.packb(value)
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
