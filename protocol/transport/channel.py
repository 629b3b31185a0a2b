"""What a channel is, however it carries messages.

Guarantee: `poll` never blocks longer than its timeout and `send` never blocks. A frame that cannot be decoded is returned as a
`BadFrame` with the reason; it raises nothing. One thread owns a channel and calls all of its methods; any thread may call `wake`,
which makes a running `poll` return early.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.wire.codec import CodecError, SchemaMismatchError, decode
from protocol.wire.messages import Message, ProducerMessage, TrainerMessage


@dataclass(frozen=True)
class BadFrame:
    """A frame that was refused. `peer_schema` is set when the peer runs another release. `frame` is the content."""

    reason: str
    peer_schema: int | None = None
    frame: bytes = field(default=b"", compare=False, repr=False)


def received(frame: bytes | memoryview, kinds: Any) -> Any:
    """Return the message in `frame`, one of `kinds`, or a `BadFrame` that says what is wrong with it."""
    try:
        return decode(frame, kinds)
    except SchemaMismatchError as error:
        return BadFrame(str(error), error.peer_version, bytes(frame))
    except CodecError as error:
        return BadFrame(str(error), frame=bytes(frame))
    except Exception as error:  # an unforeseen error costs one message
        return BadFrame(f"a message that cannot be read: {type(error).__name__}: {error}", frame=bytes(frame))


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

    def send(self, message: Message) -> bool:
        """Returns False when nobody listens; the message is then dropped."""

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]: ...

    def reset(self) -> None:
        """Drops the connection with everything queued in it and connects anew under a fresh routing id."""

    def wake(self) -> None: ...

    def close(self) -> None: ...
