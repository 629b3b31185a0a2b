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

A frame names its schema version and has the fields of that schema only. Fields that are newer are left out when a message is
encoded for an older schema, are refused in a frame of that schema, and have their defaults in the decoded message.
"""

import struct
import threading
from collections.abc import Container
from functools import cache, reduce
from operator import or_
from typing import Any, get_args

import msgspec
from isal.isal_zlib import crc32

from protocol.wire.messages import Lease, Message, Sampling
from protocol.wire.schemas import READABLE_SCHEMAS, SCHEMA_VERSION, SINCE, SINCE_MESSAGES

_MAGIC = b"SL"
_VERSION = struct.Struct("<2sH")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _VERSION.size + _CRC.size

_VERSIONED = {kind for kind in SINCE if kind not in get_args(Message)}  # parts of messages

_encoder = msgspec.msgpack.Encoder()


class _PackedLease(Lease, frozen=True, forbid_unknown_fields=True, tag="lease"):
    """A lease whose free-form fields are not decoded yet."""

    prompt: msgspec.Raw
    columns: dict[str, msgspec.Raw]


@cache
def _nested(message: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields of a message, as of any schema, that hold another struct whose fields came with several schemas."""
    names = {kind.__name__ for kind in _VERSIONED}  # which their older forms have too
    types = {field.name: field.type for field in msgspec.structs.fields(message)}
    return {name: kind for name, kind in types.items() if getattr(kind, "__name__", "") in names}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return msgspec.field(default=field.default, default_factory=field.default_factory)  # type: ignore[call-overload]


@cache
def _as_of(
    schema_version: int, message: type[msgspec.Struct], form: type[msgspec.Struct] | None = None
) -> type[msgspec.Struct]:
    """The type of a message in that schema, made of `form`, a type with the same fields, where it is given."""
    kind = form or message
    newer = {name for name, since in SINCE.get(message, {}).items() if since > schema_version}
    nested = {name: _as_of(schema_version, of) for name, of in _nested(message).items()}
    if not newer and all(nested[name] is of for name, of in _nested(message).items()):
        return kind
    fields = [
        (field.name, nested.get(field.name, field.type), _default(field))
        for field in msgspec.structs.fields(kind)
        if field.name not in newer
    ]
    tag = kind.__struct_config__.tag
    return msgspec.defstruct(kind.__name__, fields, frozen=True, forbid_unknown_fields=True, tag=tag)


_one_builds = threading.Lock()
"""While one thread still looks up nested types, msgspec 0.22 gives the type to another thread, whose decoder then crashes."""


def _decoder(kinds: Any, schema_version: int) -> tuple[msgspec.msgpack.Decoder[Any], dict[type, type]]:
    """The decoder of such messages, and the message's own type by the type that the decoder returns."""
    with _one_builds:
        return _built(kinds, schema_version)


@cache
def _built(kinds: Any, schema_version: int) -> tuple[msgspec.msgpack.Decoder[Any], dict[type, type]]:
    each = [kind for kind in get_args(kinds) or (kinds,) if SINCE_MESSAGES.get(kind, 1) <= schema_version]
    kind_of = {_as_of(schema_version, kind, _PackedLease if kind is Lease else None): kind for kind in each}
    return msgspec.msgpack.Decoder(reduce(or_, kind_of)), kind_of


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
        readable = " and ".join(map(str, READABLE_SCHEMAS))
        super().__init__(f"peer speaks protocol schema {peer_version}, this process speaks {readable}")
        self.peer_version = peer_version


def encode(message: Message, *, schema_version: int = SCHEMA_VERSION) -> bytes:
    """Returns the frame of `message`, without the fields that are newer than `schema_version`; `CodecError` if a free-form
    field (a prompt or a dataset column) holds a value that msgpack cannot carry, or that the peer would refuse."""
    try:
        if SINCE_MESSAGES.get(type(message), 0) > schema_version:
            raise ValueError(f"schema {schema_version} does not have it")
        kind = _as_of(schema_version, type(message))
        body = _encoder.encode(message if kind is type(message) else _copied(message, kind))
        if isinstance(message, Lease):
            _decoded(
                memoryview(body), Message, schema_version
            )  # what the peer would refuse must not leave: the lease would go out for ever
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise CodecError(f"cannot encode {type(message).__name__}: {error}") from error
    version = _VERSION.pack(_MAGIC, schema_version)
    return version + _CRC.pack(crc32(body, crc32(version))) + body


def schema_of(frame: bytes | memoryview) -> int:
    return int(_VERSION.unpack(frame[: _VERSION.size])[1])


def decode(frame: bytes | memoryview, kinds: Any = Message, readable_schemas: Container[int] = READABLE_SCHEMAS) -> Any:
    """Returns the message in `frame`, of one of `kinds`. An intact frame of a schema that is not readable raises
    `SchemaMismatchError`, and whatever else is not one such message `CodecError`."""
    if len(frame) < PREFIX_BYTES:
        raise CodecError(f"frame of {len(frame)} bytes is shorter than the {PREFIX_BYTES}-byte prefix")
    view = memoryview(frame)
    version, crc, body = view[:4], view[4:PREFIX_BYTES], view[PREFIX_BYTES:]
    magic, schema_version = _VERSION.unpack(version)
    if magic != _MAGIC:
        raise CodecError(f"frame starts with {magic!r}, not {_MAGIC!r}")
    if _CRC.unpack(crc)[0] != crc32(body, crc32(version)):
        raise CodecError("checksum mismatch")
    if schema_version not in readable_schemas:
        raise SchemaMismatchError(schema_version)
    try:
        return _decoded(body, kinds, schema_version)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise CodecError(f"body refused: {error}") from error


def _decoded(body: memoryview, kinds: Any, schema_version: int) -> Any:
    decoder, kind_of = _decoder(kinds, schema_version)
    message = decoder.decode(body)
    kind = kind_of[type(message)]
    if kind is type(message):
        return message
    if kind is not Lease:
        return _copied(message, kind)
    fields = msgspec.structs.asdict(message)
    fields["sampling"] = _copied(message.sampling, Sampling)
    fields["prompt"] = _unpacked(message.prompt)
    fields["columns"] = {name: _unpacked(packed) for name, packed in message.columns.items()}
    return Lease(**fields)


def _copied(message: msgspec.Struct, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A `kind` with the fields that `message` has too. Its other fields have their defaults."""
    if type(message) is kind:
        return message
    values = {name: getattr(message, name) for name in kind.__struct_fields__ if hasattr(message, name)}
    return kind(**values | {name: _copied(values[name], of) for name, of in _nested(kind).items() if name in values})


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
