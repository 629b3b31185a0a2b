"""Running programs in the sandbox, from outside.

Guarantee: `run` returns within `time_s` and a little, and nothing of the program is left then, because its keeper
(`protocol.processes.kept`) has killed whatever there was. Output beyond `output_bytes` ends the program. `run` holds no lock and
no thread.
"""

import asyncio
import contextlib
import math
import os
import socket
from dataclasses import dataclass
from typing import Any, Literal

from producer.rewards.sandbox.isolation import ENVIRONMENT, Isolation, Limits, refusal
from protocol.processes.kept import KeptProcess

_OWN_BYTES = 2**25  # resident: the keeper and bubblewrap
_LOOK_EVERY_S = 0.05

Ended = Literal["itself", "time", "memory", "output"]


@dataclass(frozen=True)
class Outcome:
    """`code`: the exit status, 128 + N for signal N. `ended`: by itself, or by which limit."""

    code: int
    output: bytes
    errors: bytes
    ended: Ended

    @property
    def ended_well(self) -> bool:
        return self.ended == "itself" and self.code == 0


class Sandbox:
    """Runs Python programs with bubblewrap.

    Args:
        python: interpreter, and with it what the programs can read and import. None: this one, without packages.

    Raises:
        ConfigError: there is no such interpreter, no bubblewrap or no libseccomp.
    """

    def __init__(self, limits: Limits, python: str | None = None) -> None:
        self.limits = limits
        self._isolation = Isolation(limits, python)

    async def run(self, program: str, stdin: bytes = b"", channel: socket.socket | None = None) -> Outcome:
        """Runs `program` as a script of its own.

        Args:
            channel: that the program has under the same descriptor. It is closed on this side.

        Raises:
            ConfigError: the isolation could not be set up, so that nothing was run.
        """
        ours, theirs = zip(*(socket.socketpair() for _ in range(4)), strict=True)
        with contextlib.ExitStack() as given:
            for end in (*theirs, *([channel] if channel else ())):
                given.enter_context(end)
            main = given.enter_context(os.fdopen(os.memfd_create("main.py"), "w+b"))
            main.write(program.encode())
            main.seek(0)
            passed = [main.fileno(), theirs[3].fileno(), *([channel.fileno()] if channel else ())]
            try:
                process = KeptProcess(
                    self._isolation.command(*passed[:2]), stdin=theirs[0], stdout=theirs[1],
                    stderr=theirs[2], pass_fds=passed, env=ENVIRONMENT, cwd="/",
                )  # fmt: skip
            except BaseException:
                _close(ours)
                raise
        try:
            return await self._watch(process, ours, stdin)
        finally:
            ending = process.terminate()
            _close(ours)
            await asyncio.wait({ending})

    async def _watch(self, process: KeptProcess, ends: tuple[socket.socket, ...], stdin: bytes) -> Outcome:
        streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        output, errors = _Collected(self.limits.output_bytes), _Collected(self.limits.output_bytes)
        tasks: list[asyncio.Future[Any]] = []
        try:
            for end in ends[:3]:
                streams.append(await asyncio.open_connection(sock=end))  # noqa: PERF401 - all that were opened are closed
            reads = output.read(streams[1][0]), errors.read(streams[2][0])
            tasks += [
                asyncio.gather(*reads, process.exited(math.inf)),
                asyncio.ensure_future(_feed(streams[0][1], stdin)),
            ]
            ended = await self._until_it_ends(process, tasks[0], (output, errors))
            status = await asyncio.shield(process.terminate())
            if ended != "itself":
                await asyncio.wait(tasks[:1], timeout=_LOOK_EVERY_S)
        finally:
            for task in tasks:
                task.cancel()
            for _, writer in streams:
                writer.transport.abort()
            await asyncio.gather(*tasks, return_exceptions=True)
        if ended == "itself" and ends[3].recv(1) != b"1":
            raise refusal(errors.content.decode(errors="replace").strip()[-400:])
        code = -9 if status is None else status
        return Outcome(128 - code if code < 0 else code, bytes(output.content), bytes(errors.content), ended)

    async def _until_it_ends(
        self, process: KeptProcess, reading: "asyncio.Future[Any]", collected: tuple["_Collected", ...]
    ) -> Ended:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.limits.time_s
        while True:
            await asyncio.wait({reading}, timeout=_LOOK_EVERY_S)
            if reading.done():
                return "itself"
            if any(each.is_full for each in collected):
                return "output"
            if clock() > deadline:
                return "time"
            if process.resident_bytes() > self.limits.memory_bytes + _OWN_BYTES:
                return "memory"

    async def check(self) -> None:
        """Runs a self-test that tries to get around the isolation.

        Raises:
            ConfigError: the machine cannot isolate it; the message has the fix.
        """
        outcome = await self.run(_SELF_TEST.format(processes=self.limits.processes))
        if outcome.output != b"held" or outcome.code != 0:
            found = (outcome.errors or outcome.output).decode(errors="replace").strip()[-400:]
            raise refusal(found or f"the self-test ended by {outcome.ended} with {outcome.code}")


class _Collected:
    """Output up to a limit. What comes after it is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.content = bytearray()
        self._max_bytes = max_bytes

    @property
    def is_full(self) -> bool:
        return len(self.content) >= self._max_bytes

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(2**16):
            self.content += part[: self._max_bytes - len(self.content)]


async def _feed(stream: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program that ends early has not read everything
        stream.write(given)
        await stream.drain()
    stream.close()


def _close(ends: tuple[socket.socket, ...]) -> None:
    for end in ends:
        end.close()


_SELF_TEST = """
import errno, os, socket, time
assert os.getuid() == 1000 and os.getpid() < 4
for folder in ("/", "/usr"):
    try:
        open(folder + "/written", "w")
    except OSError:
        continue
    raise SystemExit(folder + " can be written to")
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except OSError as error:
    assert error.errno == errno.EPERM, "there is a network"
number = 0
try:
    while number <= {processes}:
        if os.fork() == 0:
            time.sleep(10)
            os._exit(0)
        number += 1
except OSError:
    print("held", end="", flush=True)
else:
    raise SystemExit("processes are not limited (Linux 5.14 or newer limits them)")
"""
