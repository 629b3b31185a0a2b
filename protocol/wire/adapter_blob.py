"""An adapter as one blob of bytes, and back to a folder that PEFT and vLLM load.

Guarantee: `unpack` writes only the two named files, and the folder appears under its final name complete or not at all. A crash
of the machine may damage it, but then the process that reads it is gone too.
"""

import hashlib
from pathlib import Path

import msgspec

from protocol.runtime.files import staged


class AdapterBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two files of a PEFT adapter: adapter_config.json and adapter_model.safetensors."""

    config_json: bytes
    safetensors: bytes


class _Views(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `AdapterBlob` that is not copied out of the blob."""

    config_json: memoryview
    safetensors: memoryview


class BlobError(ValueError):
    """The bytes are not the announced adapter."""


class DamagedBlobError(BlobError):
    """The checksum of the bytes differs. Another download may be right."""


def pack(blob: AdapterBlob) -> tuple[bytes, str]:
    data = msgspec.msgpack.encode(blob)
    return data, hashlib.sha256(data).hexdigest()


def verify(data: bytes | memoryview, digest: str) -> None:
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise DamagedBlobError(
            f"checksum mismatch: announced {digest[:12]}, received {actual[:12]} ({len(data)} bytes)"
        )


def unpack(data: bytes | memoryview, digest: str | None, folder: Path) -> None:
    """Writes the adapter in `data` to `folder`, which must not exist, or raises `BlobError`. With `digest` None the caller has
    verified `data` already."""
    if digest is not None:
        verify(data, digest)
    try:
        blob = msgspec.msgpack.decode(data, type=_Views)
    except msgspec.DecodeError as error:
        raise BlobError(f"not an adapter blob: {error}") from error
    if folder.exists():
        raise FileExistsError(f"{folder} is there already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staged(folder, durable=False) as partial:
        partial.mkdir()
        (partial / "adapter_config.json").write_bytes(blob.config_json)
        (partial / "adapter_model.safetensors").write_bytes(blob.safetensors)
