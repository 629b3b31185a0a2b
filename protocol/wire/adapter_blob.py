"""An adapter as one blob of bytes, and back to a folder that PEFT and vLLM load.

Guarantee: `unpack` writes only the two named files, and the folder appears under its final name complete or not at all. A crash
of the machine may damage it, but then the process that reads it is gone too.
"""

import hashlib
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from protocol.runtime.files import staged


class Anchor(NamedTuple):
    """A blob on which another one builds, and the sha256 that it has to have."""

    digest: str
    data: bytes | memoryview


Unpack = Callable[[bytes | memoryview, str | None, Path, Anchor | None], int]
"""Writes the files of a policy: see `unpack`."""

_LENGTH = struct.Struct("<Q")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class AdapterBlob(NamedTuple):
    """The two files of a PEFT adapter, `CONFIG` and `TENSORS`. In a blob they stand one behind the other, with the length of the
    first one in front, so that they may be of any size."""

    config_json: bytes | memoryview
    safetensors: bytes | memoryview


class BlobError(ValueError):
    """The bytes are not the announced adapter."""


class DamagedBlobError(BlobError):
    """The checksum of the bytes differs. Another download may be right."""


def pack(blob: AdapterBlob) -> tuple[bytes, str]:
    """Return the bytes of a blob, and their sha256 in hex."""
    data = b"".join((_LENGTH.pack(len(blob.config_json)), *blob))
    return data, hashlib.sha256(data).hexdigest()


def parse(data: bytes | memoryview) -> AdapterBlob:
    """Return the files in a blob, which are not copied out of it. Raises BlobError."""
    view = memoryview(data)
    end = _LENGTH.size + (_LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else len(view))
    if end > len(view):
        raise BlobError("not an adapter blob: it is shorter than its beginning says")
    return AdapterBlob(view[_LENGTH.size : end], view[end:])


def verify(data: bytes | memoryview, digest: str) -> None:
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise DamagedBlobError(
            f"checksum mismatch: announced {digest[:12]}, received {actual[:12]} ({len(data)} bytes)"
        )


def checksum_of(folder: Path) -> int:
    """Return the CRC-32 of the two files in `folder`, one after the other. Raises OSError, ValueError if one is empty."""
    with (folder / TENSORS).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tensors:
        return crc32(tensors, crc32((folder / CONFIG).read_bytes()))


def unpack(data: bytes | memoryview, digest: str | None, folder: Path, anchor: Anchor | None = None) -> int:
    """Write the adapter in `data` to `folder`, which must not exist, and return its `checksum_of`. With `digest` None the caller
    has verified `data` already. Raises `BlobError`, also for an anchor, which no adapter has."""
    if anchor is not None:
        raise BlobError("an adapter builds on no other blob, and the trainer names one")
    if digest is not None:
        verify(data, digest)
    blob = parse(data)
    write_files(folder, {CONFIG: blob.config_json, TENSORS: blob.safetensors})
    return crc32(blob.safetensors, crc32(blob.config_json))


def write_files(folder: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Write a folder with these files, which must not exist. It appears whole."""
    if folder.exists():
        raise FileExistsError(f"{folder} is there already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staged(folder, durable=False) as partial:
        partial.mkdir()
        for name, data in files.items():
            (partial / name).write_bytes(data)
