"""What a channel is, whichever way it carries messages.

Guarantee: `poll` never blocks longer than its timeout, `send` never blocks, and a frame that does not decode comes out
as a `BadFrame` with its reason instead of an exception. All methods but `wake` belong to the one thread that owns the
channel; `wake` may be called from any thread and makes a running `poll` return early.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.codec import CodecError, SchemaMismatchError, decode
from protocol.messages import Message, ProducerMessage, TrainerMessage


@dataclass(frozen=True)
class BadFrame:
    """A frame that was refused. `peer_schema` is set when the peer runs another release; `frame` is what arrived."""

    reason: str
    peer_schema: int | None = None
    frame: bytes = field(default=b"", compare=False, repr=False)


def received(frame: bytes, kinds: Any) -> Any:
    """The message in `frame`, one of `kinds`, or what is wrong with it as a `BadFrame`."""
    try:
        return decode(frame, kinds)
    except SchemaMismatchError as error:
        return BadFrame(str(error), error.peer_version, frame)
    except CodecError as error:
        return BadFrame(str(error), frame=frame)


class ServerChannel(Protocol):
    """The trainer's end: many peers, each named by an opaque routing id."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Returns False when the peer cannot be reached; the message is then dropped."""
        ...

    def poll(self, timeout_s: float) -> list[tuple[bytes, ProducerMessage | BadFrame]]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ClientChannel(Protocol):
    """A producer's end: one trainer."""

    def send(self, message: Message) -> bool:
        """Returns False when nobody listens; the message is then dropped."""
        ...

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]: ...

    def reset(self) -> None:
        """Drops the connection with everything queued in it and connects anew under a fresh routing id."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
