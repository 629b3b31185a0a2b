"""An adapter as one blob of bytes, and back to a folder that PEFT and vLLM load.

Guarantee: `unpack` writes only the two named files, only after the sha256 of the blob matched, and the folder appears
under its final name complete or not at all.
"""

import hashlib
import os
import shutil
from pathlib import Path

import msgspec


class AdapterBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two files of a PEFT adapter: adapter_config.json and adapter_model.safetensors."""

    config_json: bytes
    safetensors: bytes


class BlobError(ValueError):
    """Bytes that are not the adapter they were announced as."""


def pack(blob: AdapterBlob) -> tuple[bytes, str]:
    """Returns the bytes and their sha256 in hex."""
    data = msgspec.msgpack.encode(blob)
    return data, hashlib.sha256(data).hexdigest()


def unpack(data: bytes, digest: str, folder: Path) -> None:
    """Verifies `data` and writes the adapter to `folder`, which must not exist.

    Raises:
        BlobError: the checksum differs or the bytes are no adapter.
    """
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise BlobError(f"checksum mismatch: announced {digest[:12]}, received {actual[:12]} ({len(data)} bytes)")
    try:
        blob = msgspec.msgpack.decode(data, type=AdapterBlob)
    except msgspec.DecodeError as error:
        raise BlobError(f"not an adapter blob: {error}") from error
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in (("adapter_config.json", blob.config_json), ("adapter_model.safetensors", blob.safetensors)):
        with (partial / name).open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    partial.rename(folder)
