"""Both daemons of a run as children of one process.

Guarantee: the daemons are the commands that services run, and none of them outlives this process (`protocol.runtime.keeper`). A
producer that ends is started again where a new start can help. Its output waits for no reader: a long line is shown in parts.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from protocol.errors import ExitCode
from protocol.runtime.child import KeptProcess
from protocol.runtime.processes import descendants, exit_text
from protocol.runtime.supervisor import restart

Show = Callable[[str, str], None]
"""Takes a daemon's name, and one line of its output or about it."""

TRAINER, PRODUCER = "trainer", "producer"
_GRACE_S = 300.0  # between SIGTERM and SIGKILL: a last checkpoint of a large model takes minutes
_PRODUCER_GRACE_S = 60.0  # it hands back in a quarter of a minute, and may hang in a library while it starts
_FOLLOW_S = 30.0  # for a producer to end after its trainer has said goodbye
_LOOK_S = 0.1
_READ_BYTES = _LONGEST_LINE = 65_536


class Pair:
    """A trainer and its producer.

    Args:
        commands: the command line of each.
        show: called for every line that they write.
        grace_s: between asking a daemon to end and killing it.
    """

    def __init__(self, trainer: Sequence[str], producer: Sequence[str], show: Show, grace_s: float = _GRACE_S) -> None:
        self._commands = {TRAINER: list(trainer), PRODUCER: list(producer)}
        self._show = show
        self._grace_s = grace_s
        self._processes: dict[str, KeptProcess] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._is_killed = False

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask both to end, as Ctrl-C does; the second call kills them."""
        if not self._stop.is_set():
            self._stop.set()
            self._show("", "stopping both daemons; Ctrl-C again kills them, without a last checkpoint")
            return
        self._is_killed = True
        for process in self._processes.values():
            for pid in reversed(descendants(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def run(self) -> int:
        """Return the trainer's exit code once both have ended; a producer's where no start of it can help."""
        producer = asyncio.create_task(self._keep_producer())
        trainer = asyncio.create_task(self._run_once(TRAINER))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({producer, trainer, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await self._terminate(TRAINER, PRODUCER)
            elif producer.done() and await producer != ExitCode.OK:
                await self._terminate(TRAINER)
                return await producer
            code = await trainer
            await asyncio.wait({producer}, timeout=_FOLLOW_S if code == ExitCode.OK else 0)
            self._stop.set()
            await self._terminate(PRODUCER)
            await producer
            return ExitCode.INTERRUPTED if self._is_killed else code
        finally:
            stopped.cancel()
            await self._terminate(TRAINER, PRODUCER)
            await asyncio.gather(*self._readers)

    async def _keep_producer(self) -> int:
        """Return the code of a producer that stays down."""
        failures = 0
        while True:
            started = time.monotonic()
            code = await self._run_once(PRODUCER)
            again = None if self._stop.is_set() else restart(code, time.monotonic() - started, failures)
            if again is None:
                return code
            failures = again.failures
            self._show(PRODUCER, f"ended ({exit_text(code)}), and starts again in {again.pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), again.pause_s)
            if self._stop.is_set():
                return ExitCode.OK

    async def _run_once(self, name: str) -> int:
        """Run a daemon from start to end; return its exit code, negative for a signal."""
        reading, writing = os.pipe()
        try:
            process = KeptProcess(
                self._commands[name],
                self._grace_s if name == TRAINER else min(self._grace_s, _PRODUCER_GRACE_S),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        finally:
            os.close(writing)
        self._processes[name] = process
        reader = asyncio.create_task(self._forward(name, reading))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        while (code := await process.exited(_LOOK_S)) is None:
            pass
        await reader
        return code

    async def _forward(self, name: str, descriptor: int) -> None:
        """Show the lines of a pipe to its end, and close it."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            rest = b""
            while part := await stream.read(_READ_BYTES):
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._show(name, line.decode(errors="replace"))
            if rest:
                self._show(name, rest.decode(errors="replace"))
        finally:
            transport.close()

    async def _terminate(self, *names: str) -> None:
        """Ask these to end, and return when everything that they started is gone."""
        asked = [self._processes[name].terminate() for name in names if name in self._processes]
        if asked:
            await asyncio.wait(asked)
