"""What a child process writes to standard output and standard error, as lines of the daemon's log.

Guarantee: each line names its source. A block is what comes within half a second or during one call; its first 4 KiB are kept,
and of one source the first few blocks and then one a minute (`protocol.throttle`). A process that writes without end waits for
its pipe and takes no more than a hundredth of the daemon's loop. Descriptors 1 and 2 themselves are read, so the output of native
code and of children of the process is included.
"""

import asyncio
import contextlib
import fcntl
import logging
import os

from protocol.throttle import Throttle

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
        with contextlib.suppress(OSError):  # a user has only so many large pipes
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._reading: asyncio.TimerHandle | None = None
        self._listen()

    def begin(self, source: str) -> None:
        """Names the writer of what comes from now on, which ends the block of the writer before."""
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
        """Reads once. Returns whether anybody can still write."""
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
