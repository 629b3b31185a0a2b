"""A process that runs code of the user's: requests and answers, its output in the log, and its end.

Guarantee: it ends with the daemon, however that ends, and nothing that it started outlives it (`protocol.runtime.keeper`).
`terminate` begins without an await and goes on by itself, so a cancelled caller leaves nothing half done. An answer that the
daemon cannot read, or that is too long, costs this process and no other. Its output becomes lines of the daemon's log, which name
their source: the first 4 KiB of each block, the first few blocks of a source and then one a minute. A process that writes without
end waits for its pipe.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from protocol.errors import UNREADABLE, UNSENDABLE
from protocol.runtime.logs import Throttle
from protocol.runtime.processes import Family, descendants, exit_text
from protocol.runtime.worker_channel import LENGTH

logger = logging.getLogger(__name__)

_MAX_BLOCK_BYTES = 4096
_BLOCK_S = 0.5
_READ_BYTES = _PIPE_BYTES = 2**20
_PAUSE_S = 0.02


class WorkerOutput:
    """Reads `descriptor`, the end of a pipe, and closes it. The log names the writer `source`."""

    def __init__(self, descriptor: int, throttle: Throttle, source: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._throttle = throttle
        self._source = source
        self._block = bytearray()
        self._num_left_out = 0
        self._flushing: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # the number of large pipes of a user is limited
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._reading: asyncio.TimerHandle | None = None
        self._listen()

    def begin(self, source: str) -> None:
        """Name the writer of what comes from now on, which ends the block of the writer before."""
        if source != self._source:
            self._take()
            self._flush()
            self._source = source

    def close(self) -> None:
        if self._descriptor >= 0:
            self._take()
            self._stop_listening()
            os.close(self._descriptor)
            self._descriptor = -1
        self._flush()

    def _listen(self) -> None:
        self._reading = None
        self._loop.add_reader(self._descriptor, self._readable)

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._reading is not None:
            self._reading.cancel()

    def _readable(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._take():
            self._reading = self._loop.call_later(_PAUSE_S, self._listen)

    def _take(self) -> bool:
        """Read once. Returns whether the pipe is still open."""
        try:
            part = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        kept = part[: _MAX_BLOCK_BYTES - len(self._block)]
        self._block += kept
        self._num_left_out += len(part) - len(kept)
        if part and self._flushing is None:
            self._flushing = self._loop.call_later(_BLOCK_S, self._flush)
        return bool(part)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        text = self._block.decode(errors="replace").strip()
        left_out = f" ... ({self._num_left_out:,} more bytes)" if self._num_left_out else ""
        self._block.clear()
        self._num_left_out = 0
        if text or left_out:
            self._throttle(f"output of {self._source}", f"{self._source} wrote: {text}{left_out}", logging.INFO)


_KEEPER = Path(__file__).with_name("keeper.py")
_LOOK_EVERY_S = 0.01
_KEEPER_S = 10.0  # for the keeper to kill everything; it needs milliseconds
_KERNEL_S = 20.0  # for the kernel to let go what was killed


class KeptProcess:
    """A command with its keeper, or `OSError`. When it is terminated it has `grace_s` between SIGTERM and SIGKILL. `how` are
    options of `subprocess.Popen`."""

    def __init__(self, command: list[str], grace_s: float = 0.0, **how: Any) -> None:
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), str(grace_s)]
        self._grace_s = grace_s
        self._process = subprocess.Popen([*keeper, *command], start_new_session=True, **how)
        self.resident_bytes = Family(self._process.pid).resident_bytes
        self._ending: asyncio.Task[int | None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the keeper. The other processes are below it."""
        return self._process.pid

    async def exited(self, within_s: float) -> int | None:
        """The exit status, negative for a signal, or None if the process does not end in time."""
        deadline = time.monotonic() + within_s
        while (status := self._process.poll()) is None and time.monotonic() < deadline:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(_LOOK_EVERY_S)
        return status

    def terminate(self) -> "asyncio.Task[int | None]":
        """The task is done when the process and everything that it started are gone. It returns None if that failed."""
        if self._ending is None:
            self._process.send_signal(signal.SIGTERM)
            self._ending = asyncio.ensure_future(self._ended())
        return self._ending

    async def _ended(self) -> int | None:
        status = await self.exited(self._grace_s + _KEEPER_S)
        if status is None:  # the keeper is stopped, or waits in vain
            for pid in reversed(descendants(self.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = await self.exited(_KERNEL_S)
        if status is None:
            logger.error(
                "process %d was killed and does not end; the kernel waits for something (often a network disk) on its behalf",
                self.pid,
            )
        return status


MAX_FRAME_BYTES = 64 * 2**20

_EXIT_GRACE_S = 1.0
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # a context of its own takes half a GiB of a GPU that the daemon has filled
_Frame = TypeVar("_Frame")


class ChildEndedError(Exception):
    """The child has closed its connection, has sent what is no frame, or could not be started. The text says which."""


class ChildProcess:
    """The process of `COMMAND FD ARGUMENT...`, where FD is its `protocol.runtime.worker_channel`, or `ChildEndedError`.

    Args:
        source: how the log names what the process writes.
        environment: variables beside the daemon's own; a child that is to have a GPU needs it there.
        grace_s: time between SIGTERM and SIGKILL when the process is terminated.
        codec: `msgspec.msgpack` or `msgspec.json`, for the bodies of frames.
    """

    def __init__(
        self,
        command: Sequence[str],
        *arguments: str,
        throttle: Throttle,
        source: str,
        environment: Mapping[str, str] | None = None,
        grace_s: float = 0.0,
        codec: Any = msgspec.msgpack,
    ) -> None:
        self._codec = codec
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self._socket, channel = socket.socketpair()
                ours.enter_context(self._socket)
                theirs.enter_context(channel)
                reading, writing = os.pipe()
                ours.callback(os.close, reading)
                theirs.callback(os.close, writing)
                self.process = KeptProcess(
                    [*command, str(channel.fileno()), *arguments],
                    grace_s,
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

    async def ask(self, message: Any, kind: type[_Frame]) -> _Frame:
        """Send `message` and return the answer. Raise ChildEndedError if the child has ended, or the message cannot be sent."""
        await self.send(message)
        return await self.receive(kind)

    async def send(self, message: Any) -> None:
        """Send `message`. Raise ChildEndedError if it cannot be encoded; `receive` notices the end of the child."""
        try:
            body = self._codec.encode(message)
        except UNSENDABLE as error:
            raise ChildEndedError(f"it cannot be sent what it is asked: {error}") from None
        _, writer = await self._connected()
        writer.write(LENGTH.pack(len(body)) + body)
        with contextlib.suppress(ConnectionError):  # `receive` finds out how it ended
            await writer.drain()

    async def receive(self, kind: type[_Frame]) -> _Frame:
        """The next frame; `ChildEndedError` if the child has ended."""
        reader, _ = await self._connected()
        try:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise ChildEndedError(f"it answered with {size} bytes, and at most {MAX_FRAME_BYTES} are allowed")
            return self._codec.decode(await reader.readexactly(size), type=kind)  # type: ignore[no-any-return]
        except UNREADABLE as error:
            raise ChildEndedError(f"it answered with something else: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self.process.exited(_EXIT_GRACE_S)
            if status is None:
                raise ChildEndedError("it closed its connection to the daemon, and was killed") from None
            raise ChildEndedError(f"its process ended ({exit_text(status)})") from None

    def terminate(self) -> "asyncio.Task[int | None]":
        """Kill it with everything that it started. When the task is done, both are over and its last output is in the log."""
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
        """Raise `ChildEndedError` if it cannot be started, or `close` was called."""
        if self._closed:
            raise ChildEndedError("it is not started, because the daemon ends")
        command = [sys.executable, "-P", "-m", module]  # -P: no file of the user's is taken for one of our packages
        child = ChildProcess(command, *arguments, throttle=self._throttle, source=source, environment=environment)
        self._alive.add(child)
        return child

    def terminate(self, child: ChildProcess) -> None:
        """Begin to end the process; `close` waits for the end."""
        child.terminate().add_done_callback(lambda _: self._alive.discard(child))

    async def close(self) -> None:
        self._closed = True
        endings = [child.terminate() for child in self._alive]
        if endings:
            await asyncio.wait(endings)
        self._alive.clear()
