"""Running programs in the sandbox, from outside.

Guarantee: `run` returns within `time_s` and a little, and nothing of the program is left then, because its keeper
(`protocol.runtime.child`) has killed whatever there was. Output beyond `output_bytes` ends the program. `run` holds no lock and
no thread.
"""

import asyncio
import contextlib
import math
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from producer.rewards.sandbox.isolation import ENVIRONMENT, Isolation, Limits, refusal
from protocol.runtime.child import KeptProcess

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
    """Runs Python programs with bubblewrap. Arguments and errors are those of `Isolation`."""

    def __init__(self, limits: Limits, python: str | None = None) -> None:
        self.limits = limits
        self._isolation = Isolation(limits, python)

    async def run(self, program: str, stdin: bytes = b"", channel: socket.socket | None = None) -> Outcome:
        """Runs `program` as a script of its own, which has `channel` under the same descriptor; it is closed on this side. Raises
        ConfigError if the isolation could not be set up, so that nothing was run."""
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as given:
                if channel is not None:
                    given.enter_context(channel)
                ends, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
                for end, other in zip(ends, theirs, strict=True):
                    ours.enter_context(end).setblocking(False)
                    given.enter_context(other)
                main, read = (given.enter_context(_file(content)) for content in (program.encode(), stdin))
                passed = [main.fileno(), theirs[2].fileno(), *([channel.fileno()] if channel else ())]
                process = KeptProcess(
                    self._isolation.command(*passed[:2]), stdin=read, stdout=theirs[0],
                    stderr=theirs[1], pass_fds=passed, env=ENVIRONMENT, cwd="/",
                )  # fmt: skip
            try:
                return await self._watch(process, *ends)
            finally:
                await asyncio.wait({process.terminate()})

    async def _watch(
        self, process: KeptProcess, stdout: socket.socket, stderr: socket.socket, ready: socket.socket
    ) -> Outcome:
        output, errors = bytearray(), bytearray()
        reading = asyncio.gather(self._collect(stdout, output), self._collect(stderr, errors), process.exited(math.inf))
        try:
            ended = await self._until_it_ends(process, reading, (output, errors))
            status = await asyncio.shield(process.terminate())
            if ended != "itself":
                await asyncio.wait([reading], timeout=_LOOK_EVERY_S)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if ended == "itself" and ready.recv(1) != b"1":
            raise refusal(errors.decode(errors="replace").strip()[-400:])
        code = -9 if status is None else status
        return Outcome(128 - code if code < 0 else code, bytes(output), bytes(errors), ended)

    async def _collect(self, end: socket.socket, into: bytearray) -> None:
        """Reads to the end of the output. What is beyond the limit is dropped."""
        loop = asyncio.get_running_loop()
        while part := await loop.sock_recv(end, 2**16):
            into += part[: self.limits.output_bytes - len(into)]

    async def _until_it_ends(
        self, process: KeptProcess, reading: "asyncio.Future[Any]", collected: tuple[bytearray, ...]
    ) -> Ended:
        deadline = time.monotonic() + self.limits.time_s
        while not (await asyncio.wait({reading}, timeout=_LOOK_EVERY_S))[0]:
            if any(len(each) >= self.limits.output_bytes for each in collected):
                return "output"
            if time.monotonic() > deadline:
                return "time"
            if process.resident_bytes() > self.limits.memory_bytes + _OWN_BYTES:
                return "memory"
        return "itself"

    async def check(self) -> None:
        """Runs a self-test that tries to get around the isolation. Raises ConfigError if the machine cannot isolate it;
        the message has the fix."""
        outcome = await self.run(_SELF_TEST.format(processes=self.limits.processes))
        if outcome.output != b"held" or outcome.code != 0:
            found = (outcome.errors or outcome.output).decode(errors="replace").strip()[-400:]
            raise refusal(found or f"the self-test ended by {outcome.ended} with {outcome.code}")


def _file(content: bytes) -> BinaryIO:
    """A file in memory that can only be read."""
    with os.fdopen(os.memfd_create("given"), "wb") as file:
        file.write(content)
        file.flush()
        return open(f"/proc/self/fd/{file.fileno()}", "rb")


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
