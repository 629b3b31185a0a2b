"""Messages to frames and back.

Guarantee: `decode` returns exactly the message that was encoded or raises `CodecError`; a frame with any single bit
flipped, any length, is refused. One message is one frame:

    2 bytes   magic b"SL"
    2 bytes   schema version, little-endian
    4 bytes   CRC-32 of the first four bytes and the body, little-endian
    n bytes   body: a msgpack map, `type` names the message
"""

import struct
import zlib

import msgspec

from protocol.messages import SCHEMA_VERSION, Message

_MAGIC = b"SL"
_VERSION = struct.Struct("<2sH")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _VERSION.size + _CRC.size

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class CodecError(ValueError):
    """A frame that is not one of our messages. The text says why."""


class SchemaMismatchError(CodecError):
    """A well-formed frame of another schema version: the peer runs another release."""

    def __init__(self, peer_version: int) -> None:
        super().__init__(f"peer speaks protocol schema {peer_version}, this process speaks {SCHEMA_VERSION}")
        self.peer_version = peer_version


def encode(message: Message, *, schema_version: int = SCHEMA_VERSION) -> bytes:
    """Returns the frame of `message`.

    Raises:
        CodecError: a free-form field (a prompt or a dataset column) holds a value that msgpack cannot carry.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise CodecError(f"cannot encode {type(message).__name__}: {error}") from error
    version = _VERSION.pack(_MAGIC, schema_version)
    return version + _CRC.pack(zlib.crc32(body, zlib.crc32(version))) + body


def decode(frame: bytes | memoryview) -> Message:
    """Returns the message in `frame`.

    Raises:
        SchemaMismatchError: the frame is intact, but of another schema version.
        CodecError: the frame is anything else than one intact message.
    """
    if len(frame) < PREFIX_BYTES:
        raise CodecError(f"frame of {len(frame)} bytes is shorter than the {PREFIX_BYTES}-byte prefix")
    view = memoryview(frame)
    version, crc, body = view[:4], view[4:PREFIX_BYTES], view[PREFIX_BYTES:]
    magic, schema_version = _VERSION.unpack(version)
    if magic != _MAGIC:
        raise CodecError(f"frame starts with {magic!r}, not {_MAGIC!r}")
    if _CRC.unpack(crc)[0] != zlib.crc32(body, zlib.crc32(version)):
        raise CodecError("checksum mismatch")
    if schema_version != SCHEMA_VERSION:
        raise SchemaMismatchError(schema_version)
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise CodecError(f"body refused: {error}") from error
    return message
