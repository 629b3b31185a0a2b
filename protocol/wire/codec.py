"""Messages to frames and back.

Guarantee: `decode` returns exactly the message that was encoded or raises `CodecError`. A frame of any length with one bit
flipped is refused. One message is one frame:

    2 bytes   magic b"SL"
    2 bytes   schema version, little-endian
    4 bytes   CRC-32 of the first four bytes and the body, little-endian
    n bytes   body: a msgpack map, `type` names the message

The time to decode grows with the length of the frame and with nothing else. Python does not randomize the hashes of numbers and
tuples, so all keys of a map can be made to collide, and building it takes the square of its length. Therefore a map of more than
15 entries must have text for keys, at any depth of a prompt or a column.

A frame names its schema version; a frame of another version is refused, with one sentence that names both.
"""

import struct
import threading
from functools import cache, reduce
from operator import or_
from typing import Any, get_args

import msgspec
from isal.isal_zlib import crc32

from protocol.wire.messages import Lease, Message

SCHEMA_VERSION = 2
"""The version of the wire, and of the groups in a journal. Raise it with every change of a message."""

_MAGIC = b"SL"
_VERSION = struct.Struct("<2sH")
_CRC = struct.Struct("<I")
_HEAD = _VERSION.pack(_MAGIC, SCHEMA_VERSION)
PREFIX_BYTES = _VERSION.size + _CRC.size

_encoder = msgspec.msgpack.Encoder()


class _PackedLease(Lease, frozen=True, forbid_unknown_fields=True, tag="lease"):
    """A lease whose free-form fields are not decoded yet."""

    prompt: msgspec.Raw
    columns: dict[str, msgspec.Raw]


_one_builds = threading.Lock()
"""While one thread still looks up nested types, msgspec 0.22 gives the type to another thread, whose decoder then crashes."""


def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of messages of these kinds."""
    with _one_builds:
        return _built(kinds)


@cache
def _built(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    each = [_PackedLease if kind is Lease else kind for kind in get_args(kinds) or (kinds,)]
    return msgspec.msgpack.Decoder(reduce(or_, each))


_anything = msgspec.msgpack.Decoder(Any)
_items = msgspec.msgpack.Decoder(list[msgspec.Raw])
_small_map = msgspec.msgpack.Decoder(dict[Any, msgspec.Raw])
_large_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_LARGE_MAPS = (0xDE, 0xDF)  # headers of maps with a 16-bit and a 32-bit length; up to 15 entries need neither
_SMALLEST_LARGE_MAP = 3 + 16 * 2  # bytes of a header, 16 keys and 16 values
_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
_MAX_NESTING = 64  # where it is unpacked level by level: every level reads what is inside it once more


class CodecError(ValueError):
    """A frame that holds none of our messages. The text says why."""


class SchemaMismatchError(CodecError):
    """A well-formed frame of another schema version: the peer runs another release."""

    def __init__(self, peer_version: int) -> None:
        super().__init__(f"peer speaks protocol schema {peer_version}, this process speaks {SCHEMA_VERSION}")
        self.peer_version = peer_version


def encode(message: Message) -> bytes:
    """Return the frame of `message`. Raise `CodecError` if a free-form field (a prompt or a dataset column) holds a value that
    msgpack cannot carry, or that the peer would refuse."""
    try:
        body = _encoder.encode(message)
        if isinstance(message, Lease):
            _decoded(memoryview(body), Lease)  # a lease that the peer refuses would be sent again for the whole run
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise CodecError(f"cannot encode {type(message).__name__}: {error}") from error
    return _HEAD + _CRC.pack(crc32(body, crc32(_HEAD))) + body


def decode(frame: bytes | memoryview, kinds: Any = Message) -> Any:
    """Return the message in `frame`, of one of `kinds`. Raise `SchemaMismatchError` for an intact frame of another schema, and
    `CodecError` for anything else that is not one such message."""
    if len(frame) < PREFIX_BYTES:
        raise CodecError(f"frame of {len(frame)} bytes is shorter than the {PREFIX_BYTES}-byte prefix")
    view = memoryview(frame)
    version, crc, body = view[:4], view[4:PREFIX_BYTES], view[PREFIX_BYTES:]
    magic, schema_version = _VERSION.unpack(version)
    if magic != _MAGIC:
        raise CodecError(f"frame starts with {magic!r}, not {_MAGIC!r}")
    if _CRC.unpack(crc)[0] != crc32(body, crc32(version)):
        raise CodecError("checksum mismatch")
    if schema_version != SCHEMA_VERSION:
        raise SchemaMismatchError(schema_version)
    try:
        return _decoded(body, kinds)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise CodecError(f"body refused: {error}") from error


def carried(value: Any) -> Any:
    """Return what the peer gets of a prompt or of a dataset column; raise `CodecError` if no message can carry it."""
    try:
        return _unpacked(msgspec.Raw(_encoder.encode(value)))
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise CodecError(str(error)) from error


def _decoded(body: memoryview, kinds: Any) -> Any:
    message = _decoder(kinds).decode(body)
    if not isinstance(message, _PackedLease):
        return message
    fields = msgspec.structs.asdict(message)
    fields["prompt"] = _unpacked(message.prompt)
    fields["columns"] = {name: _unpacked(packed) for name, packed in message.columns.items()}
    return Lease(**fields)


def _unpacked(packed: msgspec.Raw, nesting: int = 0) -> Any:
    """The value in `packed`. It is decoded level by level if any byte could be the header of a large map."""
    copy = bytes(packed)
    if len(copy) < _SMALLEST_LARGE_MAP or not (_LARGE_MAPS[0] in copy or _LARGE_MAPS[1] in copy):
        return _anything.decode(copy)
    if nesting > _MAX_NESTING:
        raise ValueError(f"nested more than {_MAX_NESTING} levels deep")
    first = copy[0]
    del copy  # or every level would keep one of everything below it
    if first in _ARRAYS:
        return [_unpacked(item, nesting + 1) for item in _items.decode(packed)]
    if 0x80 <= first < 0x90:
        return {key: _unpacked(value, nesting + 1) for key, value in _small_map.decode(packed).items()}
    if first not in _LARGE_MAPS:
        return _anything.decode(packed)
    try:
        entries = _large_map.decode(packed)
    except msgspec.ValidationError as error:
        raise ValueError(f"a map of more than 15 entries needs text for keys: {error}") from error
    return {key: _unpacked(value, nesting + 1) for key, value in entries.items()}
