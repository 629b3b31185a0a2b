"""What a channel is, however it carries messages.

Guarantee: `poll` never blocks longer than its timeout and `send` never blocks. A frame that cannot be decoded is returned as a
`BadFrame` with the reason; it raises nothing. One thread owns a channel and calls all of its methods; any thread may call `wake`,
which makes a running `poll` return early.

A server answers each peer in the schema of that peer's last frame. A client begins every connection in this release's schema
and changes to an older one if its trainer's frames have it, so each end sends only what the other one reads.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.wire.codec import CodecError, SchemaMismatchError, decode, schema_of
from protocol.wire.messages import Message, ProducerMessage, TrainerMessage
from protocol.wire.schemas import READABLE_SCHEMAS, SCHEMA_VERSION

_MAX_PEERS = 65_536  # more than can be connected


@dataclass(frozen=True)
class BadFrame:
    """A frame that was refused. `peer_schema` is set when the peer runs another release. `frame` is the content."""

    reason: str
    peer_schema: int | None = None
    frame: bytes = field(default=b"", compare=False, repr=False)


def received(frame: bytes | memoryview, kinds: Any, note_schema: Callable[[int], None]) -> Any:
    """The message in `frame`, one of `kinds`, or what is wrong with it as a `BadFrame`. `note_schema` gets the schema of a
    frame that is intact."""
    try:
        message = decode(frame, kinds)
    except SchemaMismatchError as error:
        note_schema(error.peer_version)
        return BadFrame(str(error), error.peer_version, bytes(frame))
    except CodecError as error:
        return BadFrame(str(error), frame=bytes(frame))
    except Exception as error:  # an error that nobody foresaw costs that one message
        return BadFrame(f"a message that cannot be read: {type(error).__name__}: {error}", frame=bytes(frame))
    note_schema(schema_of(frame))
    return message


class PeerSchemas:
    """The schema to answer each peer in. An unknown peer is answered in the oldest schema, which every peer can read."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, int] = OrderedDict()

    def note(self, peer: bytes, schema_version: int) -> None:
        self._last[peer] = _nearest(schema_version)
        self._last.move_to_end(peer)
        if len(self._last) > _MAX_PEERS:
            self._last.popitem(last=False)

    def forget(self, peer: bytes) -> None:
        self._last.pop(peer, None)

    def __getitem__(self, peer: bytes) -> int:
        return self._last.get(peer, READABLE_SCHEMAS[0])


class TrainerSchema:
    def __init__(self) -> None:
        self.version = SCHEMA_VERSION

    def note(self, schema_version: int) -> None:
        self.version = min(self.version, _nearest(schema_version))


def _nearest(schema_version: int) -> int:
    """The schema of this process that is nearest to the peer's. A newer release understands it too."""
    return min(max(schema_version, READABLE_SCHEMAS[0]), SCHEMA_VERSION)


class ServerChannel(Protocol):
    """The trainer's end: many peers, each named by an opaque routing id."""

    def authorized(self) -> dict[str, bytes] | None:
        """The public keys that may connect, by identity; None where there are no keys."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Returns False when the peer cannot be reached; the message is then dropped."""

    def poll(self, timeout_s: float) -> list[tuple[bytes, ProducerMessage | BadFrame]]: ...

    def disconnected(self) -> list[bytes]:
        """The peers whose control connection ended since the last call. One that connects again in between is among them."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ClientChannel(Protocol):
    """A producer's end: one trainer."""

    @property
    def endpoint(self) -> str:
        """Where the trainer is, for messages to people."""

    @property
    def schema_version(self) -> int: ...

    def send(self, message: Message) -> bool:
        """Returns False when nobody listens; the message is then dropped."""

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]: ...

    def reset(self) -> None:
        """Drops the connection with everything queued in it and connects anew under a fresh routing id."""

    def wake(self) -> None: ...

    def close(self) -> None: ...
