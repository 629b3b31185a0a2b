"""Links with a rate and a delay, in user space: TCP proxies, in a process of their own.

Guarantee: whatever goes over one link in one direction shares its rate, first come first served by pieces of 64 KiB, and arrives
`delay_s` after its last bit was sent. A link keeps what is on its way and 20 ms of what waits; whoever sends more waits, as TCP
has it. Nothing else of a real line is imitated: no loss, no slow start. What a link carried is counted.
"""

import asyncio
import contextlib
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import NamedTuple

_PIECE_BYTES = 65_536
_AHEAD_S = 0.02


class LinkSpec(NamedTuple):
    """A link, and what goes over it: ports of this host that lead to other ports of this host."""

    name: str
    bytes_per_s: float
    delay_s: float
    ports: dict[int, int]


class _Direction:
    def __init__(self, spec: LinkSpec) -> None:
        self._spec = spec
        self._free_at = 0.0
        self.num_bytes = 0

    def send(self, num_bytes: int) -> float:
        """When the last bit has been sent."""
        self.num_bytes += num_bytes
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._spec.bytes_per_s
        return self._free_at

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Everything of one connection, until it ends."""
        on_its_way: deque[tuple[float, bytes]] = deque()
        more = asyncio.Event()
        arriving = asyncio.create_task(self._arrive(on_its_way, more, writer))
        try:
            while piece := await reader.read(_PIECE_BYTES):
                sent_at = self.send(len(piece))
                on_its_way.append((sent_at + self._spec.delay_s, piece))
                more.set()
                await asyncio.sleep(max(0.0, sent_at - _AHEAD_S - time.monotonic()))
            on_its_way.append((time.monotonic() + self._spec.delay_s, b""))
            more.set()
            await arriving
        except OSError:
            pass
        finally:
            arriving.cancel()
            writer.close()

    async def _arrive(
        self, on_its_way: deque[tuple[float, bytes]], more: asyncio.Event, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            while not on_its_way:
                more.clear()
                await more.wait()
            at, piece = on_its_way.popleft()
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            if not piece:
                return
            writer.write(piece)
            await writer.drain()


def run(pipe: Connection, links: list[LinkSpec]) -> None:
    """Says "ready", and answers each message with the bytes that every link has carried, both ways, until the pipe closes."""
    asyncio.run(_serve(pipe, links))


async def _serve(pipe: Connection, links: list[LinkSpec]) -> None:
    carried = {}
    for link in links:
        there, back = carried[link.name] = _Direction(link), _Direction(link)
        for port, target in link.ports.items():
            await asyncio.start_server(_connect(there, back, target), "127.0.0.1", port)
    pipe.send("ready")
    while True:
        try:
            await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        pipe.send({name: [direction.num_bytes for direction in both] for name, both in carried.items()})


def _connect(there: _Direction, back: _Direction, target: int):
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        with contextlib.suppress(asyncio.CancelledError):  # at the end of all
            both = there.carry(reader, far_writer), back.carry(far_reader, writer)
            await asyncio.gather(*both, return_exceptions=True)

    return connected
