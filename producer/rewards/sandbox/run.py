"""Running programs in the sandbox, from outside.

Guarantee: `run` returns within `time_s` and a little, with nothing of the program left: the first process of its PID namespace
is killed with it, and the kernel ends whatever else is in there. Output beyond `output_bytes` ends the program. Main thread or
not, loop or not: it is a coroutine that holds no lock and no thread.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from protocol.errors import ConfigError
from protocol.processes.tree import resident_bytes

_INSIDE = Path(__file__).with_name("inside.py")
_WALLS_FAILED = 120
CHANNEL = 3  # descriptor of a program's channel
_UNTOUCHED_BYTES = 2**27  # what an interpreter reserves and does not use
_WALLS_BYTES = 2**25  # resident: the script on both sides of the wall
_LOOK_EVERY_S = 0.05
_GRACE_S = 10.0  # of a loaded host, beyond the program's own time, for walls and teardown

Ended = Literal["itself", "time", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """Of one program: seconds on the clock; resident bytes of all its processes; bytes of files; processes and threads."""

    time_s: float = 5.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 64 * 2**20
    processes: int = 8
    output_bytes: int = 2**20


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
    """Runs Python programs.

    Args:
        python: interpreter, and with it what the programs can read and import. None: this one, without packages.

    Raises:
        ConfigError: there is no such interpreter.
    """

    def __init__(self, limits: Limits, python: str | None = None) -> None:
        self.limits = limits
        self._python, self._readable = _interpreter(python or sys._base_executable)  # type: ignore[attr-defined]
        self._flags = ["-I", "-X", "utf8"] + ([] if python else ["-S"])

    async def run(self, program: str, stdin: bytes = b"", channel: socket.socket | None = None) -> Outcome:
        """`program` as a script of its own.

        Args:
            channel: that it has as descriptor `CHANNEL`. Closed on this side.

        Raises:
            ConfigError: the walls could not be built, so that nothing was run.
        """
        limits = self.limits
        spec = {
            "parent": os.getpid(),
            "readable": self._readable,
            "command": [self._python, *self._flags, "/tmp/main.py"],  # noqa: S108 - of its own inside
            "cpu_s": int(limits.time_s) + 2,
            "memory_bytes": limits.memory_bytes + _UNTOUCHED_BYTES,
            "disk_bytes": limits.disk_bytes,
            "processes": limits.processes,
            "channel": None if channel is None else channel.fileno(),
        }
        source = program.encode()
        with channel or contextlib.nullcontext():
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_INSIDE), json.dumps(spec), start_new_session=True, env={}, cwd="/",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=() if channel is None else (channel.fileno(),),
            )  # fmt: skip
        try:
            return await self._watch(process, len(source).to_bytes(8, "little") + source + stdin)
        finally:
            await _end(process)

    async def _watch(self, process: asyncio.subprocess.Process, given: bytes) -> Outcome:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        limits = self.limits
        feeding = asyncio.ensure_future(_feed(process.stdin, given))
        output, errors = _Collected(limits.output_bytes), _Collected(limits.output_bytes)
        reading = asyncio.gather(output.read(process.stdout), errors.read(process.stderr), process.wait())
        try:
            ended = await self._until_it_ends(process, reading, (output, errors))
        finally:
            feeding.cancel()
            reading.cancel()
            await asyncio.gather(feeding, reading, return_exceptions=True)
        code = process.returncode if process.returncode is not None else -signal.SIGKILL
        if code == _WALLS_FAILED and ended == "itself" and not output.content:
            raise ConfigError(_refusal(errors.content.decode(errors="replace")))
        return Outcome(128 - code if code < 0 else code, bytes(output.content), bytes(errors.content), ended)

    async def _until_it_ends(
        self, process: asyncio.subprocess.Process, reading: "asyncio.Future[Any]", collected: tuple["_Collected", ...]
    ) -> Ended:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.limits.time_s
        while True:
            await asyncio.wait({reading}, timeout=_LOOK_EVERY_S)
            ended: Ended = "itself"
            if reading.done():
                return ended
            if any(each.full for each in collected):
                ended = "output"
            elif clock() > deadline:
                ended = "time"
            elif resident_bytes(process.pid) > self.limits.memory_bytes + _WALLS_BYTES:
                ended = "memory"
            if ended != "itself":
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()  # it ends the first process inside and waits until all are gone
                await asyncio.wait({reading}, timeout=_GRACE_S)
                return ended

    async def check(self) -> None:
        """Runs a program that pulls at the walls.

        Raises:
            ConfigError: the machine cannot hold it; the message has the cures.
        """
        outcome = await self.run(_TRIAL.format(processes=self.limits.processes))
        if outcome.output != b"held" or outcome.code != 0:
            found = (outcome.errors or outcome.output).decode(errors="replace").strip()[-400:]
            raise ConfigError(_refusal(found or f"the trial ended by {outcome.ended} with {outcome.code}"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Whether it was cancelled or not: SIGTERM ends the first process inside, and the script waits until all are gone."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE_S)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


class _Collected:
    """Output up to a limit. What comes after it is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.content = bytearray()
        self._max_bytes = max_bytes

    @property
    def full(self) -> bool:
        return len(self.content) >= self._max_bytes

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(2**16):
            self.content += part[: self._max_bytes - len(self.content)]


async def _feed(stream: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # who ends early has not read everything
        stream.write(given)
        await stream.drain()
    stream.close()


def _interpreter(python: str) -> tuple[str, list[str]]:
    """Its path, and what it reads."""
    ask = (
        "import json, os, sys\n"
        "print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)]))"
    )
    try:
        said = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"rewards.functions: options.python={python} is no Python interpreter: {error}") from error
    executable, prefix, base, real = json.loads(said)
    return executable, [prefix, base, str(Path(executable).parent), str(Path(real).parent)]


def _refusal(found: str) -> str:
    return (
        f"rewards.functions: builtin code: this machine cannot hold untrusted code: {found}. It needs user, network, PID and "
        "mount namespaces of an unprivileged user. In a container: run it with `--security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined`, or as a virtual machine. Under systemd: the drop-in of docs/operations.md, "
        "Code rewards. On the host: `sysctl user.max_user_namespaces=10000`, on Debian `sysctl "
        "kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; Linux 5.14 "
        "or newer. Nothing was run without its walls"
    )


_TRIAL = """
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
    assert error.errno == errno.ENETUNREACH, "there is a network"
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
