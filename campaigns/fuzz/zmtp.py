"""What strangers say over a raw connection: scripts of ZMTP and of what is none.

Guarantee: `script(number)` is a function of the seed, the live routing ids and the number alone, so that any connection of a
campaign can be made again without the others.
"""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from campaigns.fuzz.mutations import Mutator

AWAIT_READY = b""
"""In a script: wait for the peer's READY, without which it takes no message."""

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"", b"\xff" * 20, b"NULLNULL")
_SOCKET_TYPES = (b"DEALER", b"ROUTER", b"SUB", b"PUB", b"PAIR", b"STREAM", b"", b"x" * 300)
_ROUTING_ID_BYTES = (0, 0, 5, 64, 254, 255, 256, 257, 300, 4096, 30_000)
_COMMANDS = b"READY ERROR PING PONG SUBSCRIBE CANCEL HELLO WELCOME INITIATE MESSAGE".split()
_CLAIMS = (0, 1, 255, 256, 65_535, 2**20, 2**20 + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_MOST_BYTES = 400_000  # of a script; over ipc nothing but file permissions bounds what a peer may send

End = Literal["close", "reset", "half_close", "stay"]
_ENDS: tuple[End, ...] = ("close", "close", "close", "reset", "half_close", "stay")


@dataclass(frozen=True)
class Script:
    """What a connection does: sends the pieces, waits `pause_s` after each, and ends in its way; one that stays for `stay_s`.
    `num_connections` at once do it."""

    name: str
    endpoint_index: int  # 0: control, 1: blobs
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    end: End = "close"
    stay_s: float = 0.3
    num_connections: int = 1
    takes_name: bool = False  # one that is in use, or may be

    @property
    def num_bytes(self) -> int:
        """Of all its connections."""
        return self.num_connections * sum(map(len, self.pieces))


class Chance(random.Random):
    """What one script is made of."""

    takes_name = False


def greeting(mechanism: bytes = b"NULL", version: tuple[int, int] = (3, 0), *, as_server: bool = False) -> bytes:
    return SIGNATURE + bytes(version) + mechanism[:20].ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Of ZMTP 2 and 3. Flags: 1 more, 4 command."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def old_frame(body: bytes, flags: int = 0) -> bytes:
    """Of ZMTP 1."""
    length = bytes([len(body) + 1]) if len(body) < 254 else b"\xff" + struct.pack(">Q", len(body) + 1)
    return length + bytes([flags]) + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + body, 4)


def ready(routing_id: bytes, socket_type: bytes = b"DEALER") -> bytes:
    properties = ((b"Socket-Type", socket_type), (b"Identity", routing_id))
    return command(
        b"READY", b"".join(bytes([len(key)]) + key + struct.pack(">I", len(value)) + value for key, value in properties)
    )


class Scripts:
    """See the module's guarantee. `live` are routing ids of producers that are connected."""

    def __init__(self, seed: int, live: tuple[bytes, ...]) -> None:
        self._seed = seed
        self._live = live
        self._mutator = Mutator(seed)
        self._kinds: tuple[Callable[[Chance], list[bytes]], ...] = (
            *(self._nothing, self._noise, self._old_zmtp, self._greeting, self._old_zmtp, self._swollen),
            *(self._null, self._null, self._messages, self._messages, self._many_parts, self._curve),
        )

    def script(self, number: int) -> Script:
        rng = Chance(self._seed << 40 | number)
        make = rng.choice(self._kinds)
        pieces, name = make(rng), make.__name__.strip("_")
        end, pause_s, num_connections = rng.choice(_ENDS), 0.0, 1
        if rng.random() < 0.15 and pieces:
            name, at = f"{name}_cut", rng.randrange(len(pieces))
            pieces = [*pieces[:at], pieces[at][: rng.randrange(len(pieces[at]) + 1)]]
        if rng.random() < 0.05:
            name, pause_s = f"{name}_dripping", rng.choice((0.02, 0.05, 0.05, 0.2))
            head = b"".join(pieces)[:32]
            pieces = [head[at : at + 1] for at in range(len(head))]
        elif rng.random() < 0.05:
            name, num_connections = f"{name}_storm", rng.choice((10, 100))
        stay_s = rng.choice((0.3,) * 20 + (6.0,))  # which is longer than libzmq gives a handshake
        takes_name = rng.takes_name or num_connections > 1
        return Script(name, rng.randrange(2), tuple(pieces), pause_s, end, stay_s, num_connections, takes_name)

    def _nothing(self, rng: Chance) -> list[bytes]:
        return []

    def _noise(self, rng: Chance) -> list[bytes]:
        return [
            rng.choice((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\1", b"\0" * 64, b"\xff" * 4096, SIGNATURE)),
            rng.randbytes(rng.randrange(2000)),
        ]

    def _old_zmtp(self, rng: Chance) -> list[bytes]:
        bodies = [self._body(rng) for _ in range(rng.choice((1, 1, 2, 5)))]
        last = len(bodies) - 1
        if rng.random() < 0.5:
            routing_id = self._routing_id(rng)
            sent = [old_frame(body, int(number < last)) for number, body in enumerate(bodies)]
            return [old_frame(routing_id), *sent]
        head = SIGNATURE + bytes([rng.choice((0, 1, 2)), rng.choice((1, 3, 5, 6, 10, 255))])
        return [head, frame(self._routing_id(rng)[:255]), *(frame(body, n < last) for n, body in enumerate(bodies))]

    def _greeting(self, rng: Chance) -> list[bytes]:
        version = (rng.choice((0, 1, 2, 3, 3, 3, 4, 127, 255)), rng.choice((0, 1, 2, 255)))
        data = bytearray(greeting(rng.choice(_MECHANISMS), version, as_server=rng.random() < 0.3))
        for _ in range(rng.choice((0, 0, 1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return [bytes(data), ready(self._routing_id(rng))]

    def _swollen(self, rng: Chance) -> list[bytes]:
        """Claims that are not kept, and handshakes that do not end."""
        head = bytes([rng.randrange(8)]) + struct.pack(">Q", rng.choice(_CLAIMS))
        start = [greeting(rng.choice((b"NULL", b"CURVE")))]
        if rng.random() < 0.5:
            return [*start, head, bytes(rng.choice((0, 100, 70_000, 200_000)))]
        return [*start, *(command(rng.choice(_COMMANDS), bytes(rng.randrange(2000))) for _ in range(100))]

    def _null(self, rng: Chance) -> list[bytes]:
        """A handshake without keys that is nearly right."""
        hello = bytearray(ready(self._routing_id(rng), rng.choice((b"DEALER", *_SOCKET_TYPES))))
        for _ in range(rng.choice((0, 1, 4))):
            hello[rng.randrange(min(len(hello), 60))] = rng.randrange(256)
        return [greeting(), bytes(hello), AWAIT_READY, frame(self._body(rng))]

    def _messages(self, rng: Chance) -> list[bytes]:
        sent = [self._introduced(rng)]
        for _ in range(rng.choice((1, 5, 50))):
            if rng.random() < 0.1:
                sent.append(command(rng.choice(_COMMANDS), rng.randbytes(rng.randrange(20))))
            elif rng.random() < 0.02:
                sent.append(bytes([rng.choice((2, 3, 6, 8, 255))]) + struct.pack(">Q", rng.choice(_CLAIMS)))
            else:
                sent.append(frame(self._body(rng)))
        return [*self._start(rng), b"".join(sent)[:_MOST_BYTES]]

    def _many_parts(self, rng: Chance) -> list[bytes]:
        size, number = rng.choice(((0, 5000), (1, 3000), (100, 1000), (60_000, 5), (300, 20)))
        parts = frame(bytes(size), 1) * number
        return [*self._start(rng), (parts + frame(self._body(rng)) if rng.random() < 0.7 else parts)[:_MOST_BYTES]]

    def _curve(self, rng: Chance) -> list[bytes]:
        """Keys of nobody: whoever has none can say no more than this."""
        hello = bytes([1, 0]) + bytes(72) + rng.randbytes(32) + struct.pack(">Q", 1) + rng.randbytes(80)
        sizes = (0, 1, 192, 193, 194, 195, 500)
        words = [command(b"HELLO", hello)] if rng.random() < 0.7 else [command(b"HELLO", bytes(rng.choice(sizes)))]
        words.append(command(rng.choice(_COMMANDS), rng.randbytes(rng.choice((0, 8, 96, 250, 1000)))))
        return [greeting(b"CURVE"), *words]

    def _start(self, rng: Chance) -> list[bytes]:
        return [greeting(), ready(self._routing_id(rng)), AWAIT_READY]

    def _introduced(self, rng: Chance) -> bytes:
        """After a name that is taken libzmq takes the next message for one."""
        return frame(self._routing_id(rng)) if rng.random() < 0.2 else b""

    def _routing_id(self, rng: Chance) -> bytes:
        if rng.random() < 0.1:
            rng.takes_name = True
            return rng.choice((*self._live, b"twin", b"\0", b"\0" * 255))
        return rng.randbytes(rng.choice(_ROUTING_ID_BYTES))

    def _body(self, rng: Chance) -> bytes:
        if rng.random() < 0.7:
            return self._mutator.mutant(rng.randrange(2**32)).frame
        return rng.randbytes(rng.choice((0, 1, 7, 8, 200, 5000)))
