"""Child processes that run a module of ours with code of the user's, and exchange frames with the daemon over a socket.

Guarantee: a child ends with the daemon, and everything that it started ends with it; `terminate` needs no await
(`protocol.processes.kept`). A frame above the limit is refused before it is read. What a child writes is in the daemon's log,
within bounds (`protocol.processes.worker_output`).
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from protocol.decoding import UNREADABLE, UNSENDABLE
from protocol.processes.kept import KeptProcess
from protocol.processes.tree import exit_text
from protocol.processes.worker_channel import LENGTH
from protocol.processes.worker_output import WorkerOutput
from protocol.throttle import Throttle

MAX_FRAME_BYTES = 64 * 2**20

_EXIT_GRACE_S = 1.0
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # a context of its own takes half a GiB of a GPU that the daemon has filled
_Frame = TypeVar("_Frame", bound=msgspec.Struct)


class ChildEndedError(Exception):
    """The child has closed its connection, has sent what is no frame, or could not be started. The text says which."""


class ChildProcess:
    """`python -P -m MODULE FD ARGUMENT...`, where FD is its `protocol.processes.worker_channel`, or `ChildEndedError`. Without
    -P a file of the user's that is called like one of our packages would be taken for it. `source` is how the log names what it
    writes. `environment` has variables beside the daemon's own; a child that is to have a GPU needs it there."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        throttle: Throttle,
        source: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self._socket, channel = socket.socketpair()
                ours.enter_context(self._socket)
                theirs.enter_context(channel)
                reading, writing = os.pipe()
                ours.callback(os.close, reading)
                theirs.callback(os.close, writing)
                self.process = KeptProcess(
                    [sys.executable, "-P", "-m", module, str(channel.fileno()), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=writing,
                    pass_fds=[channel.fileno()],
                    env=os.environ | _NO_GPU | dict(environment or {}),
                )
            except OSError as error:
                raise ChildEndedError(f"it cannot be started: {error}") from error
            ours.pop_all()
        self.output = WorkerOutput(reading, throttle, source)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, message: msgspec.Struct | msgspec.Raw, kind: type[_Frame]) -> _Frame:
        """Sends `message` and returns the answer; `ChildEndedError` if the child has ended, or cannot be sent that."""
        try:
            body = msgspec.msgpack.encode(message)
        except UNSENDABLE as error:
            raise ChildEndedError(f"it cannot be sent what it is asked: {error}") from None
        _, writer = await self._connected()
        writer.write(LENGTH.pack(len(body)) + body)
        with contextlib.suppress(ConnectionError):  # `receive` finds out how it ended
            await writer.drain()
        return await self.receive(kind)

    async def receive(self, kind: type[_Frame]) -> _Frame:
        """The next frame; `ChildEndedError` if the child has ended."""
        reader, _ = await self._connected()
        try:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise ChildEndedError(f"it answered with {size} bytes, of which {MAX_FRAME_BYTES} are allowed")
            return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
        except UNREADABLE as error:
            raise ChildEndedError(f"it answered with something else: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self.process.exited(_EXIT_GRACE_S)
            if status is None:
                raise ChildEndedError("it closed its connection to the daemon, and was killed") from None
            raise ChildEndedError(f"its process ended ({exit_text(status)})") from None

    def terminate(self) -> "asyncio.Task[int | None]":
        """Kills it with everything that it started. When the task is done, both are over and its last output is in the log."""
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].transport.abort()
        ending = self.process.terminate()
        ending.add_done_callback(lambda _: self.output.close())
        return ending

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket)
        return self._streams


class ChildProcesses:
    """The children of one owner, with one throttle for what they write."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._alive: set[ChildProcess] = set()
        self._closed = False

    def start(
        self, module: str, *arguments: str, source: str, environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Raises `ChildEndedError` if it cannot be started, or `close` was called."""
        if self._closed:
            raise ChildEndedError("it is not started, because the daemon ends")
        child = ChildProcess(module, *arguments, throttle=self._throttle, source=source, environment=environment)
        self._alive.add(child)
        return child

    def terminate(self, child: ChildProcess) -> None:
        """Does not wait for its end; `close` does."""
        child.terminate().add_done_callback(lambda _: self._alive.discard(child))

    async def close(self) -> None:
        self._closed = True
        endings = [child.terminate() for child in self._alive]
        if endings:
            await asyncio.wait(endings)
        self._alive.clear()
