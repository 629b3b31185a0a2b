"""A child process that runs a module of ours and answers in frames over a socket.

Guarantee: it dies with the daemon; `kill` ends it and whatever it started, by process id; a frame above the limit is refused
before it is read.
"""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from producer.process_tree import end_tree, exit_text, kill_tree

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 2**20

_EXIT_GRACE_S = 1.0
_Frame = TypeVar("_Frame", bound=msgspec.Struct)


class ChildEndedError(Exception):
    """It closed its end, or sent what is no frame. The text says how it ended."""


class ChildProcess:
    """`python -m MODULE FD PARENT_PID ARGUMENT...`, with frames of 4 bytes length and msgpack over socket FD."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> "ChildProcess":
        """
        Args:
            environment: variables beside the daemon's own.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns within milliseconds
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=os.environ | (environment or {}),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    async def ask(self, message: msgspec.Struct, kind: type[_Frame]) -> _Frame:
        """Sends `message` and returns the answer.

        Raises:
            ChildEndedError: it has ended.
        """
        body = msgspec.msgpack.encode(message)
        self._writer.write(LENGTH.pack(len(body)) + body)
        with contextlib.suppress(ConnectionError):  # receiving says how it ended
            await self._writer.drain()
        return await self.receive(kind)

    async def receive(self, kind: type[_Frame]) -> _Frame:
        """The next frame.

        Raises:
            ChildEndedError: it has ended.
        """
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise ChildEndedError(f"it answered with {size} bytes, of which {MAX_FRAME_BYTES} are allowed")
            return msgspec.msgpack.decode(await self._reader.readexactly(size), type=kind)
        except msgspec.DecodeError as error:
            raise ChildEndedError(f"it answered with something else: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await end_tree(self.process, _EXIT_GRACE_S)
            raise ChildEndedError(f"its process ended ({exit_text(status)})") from None

    async def kill(self) -> int:
        """Ends it and whatever it started, and returns its exit status."""
        self._writer.close()
        return await kill_tree(self.process)
