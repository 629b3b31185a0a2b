"""What a channel is, whichever way it carries messages.

Guarantee: `poll` never blocks longer than its timeout, `send` never blocks, and a frame that does not decode comes out
as a `BadFrame` with its reason instead of an exception. All methods but `wake` belong to the one thread that owns the
channel; `wake` may be called from any thread and makes a running `poll` return early.
"""

from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Message


@dataclass(frozen=True)
class BadFrame:
    """A frame that was refused. `peer_schema` is set when the peer runs another release."""

    reason: str
    peer_schema: int | None = None


class ServerChannel(Protocol):
    """The trainer's end: many peers, each named by an opaque routing id."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Returns False when the peer cannot be reached; the message is then dropped."""
        ...

    def poll(self, timeout_s: float) -> list[tuple[bytes, Message | BadFrame]]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ClientChannel(Protocol):
    """A producer's end: one trainer."""

    def send(self, message: Message) -> bool:
        """Returns False when nobody listens; the message is then dropped."""
        ...

    def poll(self, timeout_s: float) -> list[Message | BadFrame]: ...

    def reset(self) -> None:
        """Drops the connection with everything queued in it and connects anew under a fresh routing id."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
