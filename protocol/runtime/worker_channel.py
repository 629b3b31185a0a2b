"""The channel between a child process and the daemon, on the child's side: frames of 4 bytes length and a body over a socket.

The body is msgpack, or JSON from a process whose Python need not have msgspec.

Guarantee: only this process writes frames. If code of the user's has closed or replaced the descriptor, the process writes one
line that explains it, and ends; if the daemon has gone, it just ends. If that code has forked and both processes return, the
copy ends without a frame.
"""

import contextlib
import os
import socket
import struct
import traceback
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import msgspec

LENGTH = struct.Struct("<I")
LOST_STATUS = 74  # EX_IOERR
_TRACEBACK_LINES, _TRACEBACK_CHARACTERS = 6, 2000


def end_before_daemon() -> None:
    """Have the kernel end this process, and those that it starts, before the daemon where the host is out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")


class WorkerChannel:
    def __init__(self, descriptor: int) -> None:
        self._pid = os.getpid()
        self._socket = socket.socket(fileno=descriptor)
        self._stream = self._socket.makefile("rwb")
        self._file = self._identity()

    def receive(self) -> bytes | None:
        """The next frame; None when the daemon has closed its end."""
        self._check()
        try:
            prefix = self._stream.read(LENGTH.size)
            return self._stream.read(LENGTH.unpack(prefix)[0]) if len(prefix) == LENGTH.size else None
        except OSError as error:
            self._lost(error)

    def send(self, message: "msgspec.Struct | msgspec.Raw") -> None:
        import msgspec

        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, body: bytes) -> None:
        self._check()
        try:
            self._stream.write(LENGTH.pack(len(body)) + body)
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        try:
            is_same = self._identity() == self._file
        except OSError as error:
            self._lost(error)
        if not is_same:
            self._lost(OSError("it is another file by now"))

    def _identity(self) -> tuple[int, int]:
        found = os.fstat(self._socket.fileno())
        return found.st_dev, found.st_ino

    def _lost(self, error: OSError) -> NoReturn:
        number = self._socket.fileno()
        line = f"descriptor {number}, the connection to the daemon, was closed by code that runs here: {error}\n"
        if not isinstance(error, ConnectionError):  # which it is when the daemon has gone
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        os._exit(LOST_STATUS)


def raised() -> str:
    """The exception that is handled, as the problem of an answer: the end of its traceback, in what UTF-8 can say."""
    lines = traceback.format_exc().strip().splitlines()[-_TRACEBACK_LINES:]
    text = "\n".join(lines)[-_TRACEBACK_CHARACTERS:]
    return f"raised\n{text.encode(errors='replace').decode()}"
