"""Running programs in the sandbox, from outside.

Guarantee: `run` returns within `time_s` and a little, and nothing of the program is left then, because its keeper
(`protocol.processes.kept`) has killed whatever there was. Output beyond `output_bytes` ends the program. `run` holds no lock and
no thread.
"""

import asyncio
import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from producer.rewards.sandbox.filter import system_call_filter
from protocol.errors import ConfigError
from protocol.processes.kept import KeptProcess

_INSIDE = Path(__file__).with_name("inside.py")
_ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8"}  # noqa: S108 - the sandbox has its own
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom")  # a shared mapping of /dev/zero is memory that nobody counts
_ISOLATED = [
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--uid", "1000", "--gid", "1000",
    "--die-with-parent", "--new-session", "--cap-add", "CAP_SYS_ADMIN",  # for the mount of `inside.py`
]  # fmt: skip
_AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
_UNTOUCHED_BYTES = 2**27  # what an interpreter reserves and does not use
_OWN_BYTES = 2**25  # resident: the keeper and bubblewrap
_LOOK_EVERY_S = 0.05

Ended = Literal["itself", "time", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """Limits of one program: seconds, resident bytes of all its processes, bytes of files, and processes and threads."""

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
    """Runs Python programs with bubblewrap.

    Args:
        python: interpreter, and with it what the programs can read and import. None: this one, without packages.

    Raises:
        ConfigError: there is no such interpreter, no bubblewrap or no libseccomp.
    """

    def __init__(self, limits: Limits, python: str | None = None) -> None:
        self.limits = limits
        self._python, readable = _interpreter(python or sys._base_executable)  # type: ignore[attr-defined]
        self._flags = ["-I", "-X", "utf8"] + ([] if python else ["-S"])
        self._readable = [place for place in dict.fromkeys([*readable, *_SYSTEM]) if os.path.exists(place)]
        self._bwrap = shutil.which("bwrap") or ""
        if not self._bwrap:
            raise ConfigError(_refusal("there is no bwrap"))
        self._filter = system_call_filter().hex()
        self._is_root = os.geteuid() == 0
        self._may_mount = self._is_root and _may_mount(self._bwrap)

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
                    self.command(*passed[:2]), stdin=theirs[0], stdout=theirs[1],
                    stderr=theirs[2], pass_fds=passed, env=_ENVIRONMENT, cwd="/",
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

    def command(self, main: int, ready: int) -> list[str]:
        """The command of a program that is read from descriptor `main`. A byte in `ready` says that it is about to start.

        Root becomes nobody, so that no file of root's is the program's own and its processes are counted. What nobody may not
        read, such as an interpreter in /root, is mounted elsewhere before.
        """
        sources = {place: place for place in self._readable}
        before: list[str] = []
        if self._is_root:
            before = _AS_NOBODY
            if self._may_mount:
                sources = {place: f"/tmp/{number}" for number, place in enumerate(self._readable)}  # noqa: S108
                moved = [word for place, source in sources.items() for word in ("--ro-bind", place, source)]
                before = [self._bwrap, "--die-with-parent", "--dev-bind", "/", "/", "--tmpfs", "/tmp", *moved, *before]  # noqa: S108
        limits = self.limits
        spec = {
            "command": [self._python, *self._flags, "/main.py"],
            "cpu_s": int(limits.time_s) + 2,
            "memory_bytes": limits.memory_bytes + _UNTOUCHED_BYTES,
            "disk_bytes": limits.disk_bytes,
            "processes": limits.processes,
            "filter": self._filter,
            "ready": ready,
        }
        binds = [word for place, source in sources.items() for word in ("--ro-bind", source, place)]
        binds += [word for device in _DEVICES for word in ("--dev-bind", device, device)]
        root = ["--ro-bind-data", str(main), "/main.py", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/"]  # noqa: S108
        inside = [self._python, "-I", "-S", "-c", _INSIDE.read_text(), json.dumps(spec)]
        return [*before, self._bwrap, *_ISOLATED, *binds, *root, "--", *inside]

    async def _watch(self, process: KeptProcess, ends: tuple[socket.socket, ...], stdin: bytes) -> Outcome:
        streams = [await asyncio.open_connection(sock=end) for end in ends[:3]]
        output, errors = _Collected(self.limits.output_bytes), _Collected(self.limits.output_bytes)
        feeding = asyncio.ensure_future(_feed(streams[0][1], stdin))
        reading = asyncio.gather(output.read(streams[1][0]), errors.read(streams[2][0]), process.exited(math.inf))
        try:
            ended = await self._until_it_ends(process, reading, (output, errors))
            status = await asyncio.shield(process.terminate())
            if ended != "itself":
                await asyncio.wait({reading}, timeout=_LOOK_EVERY_S)
        finally:
            for task in (feeding, reading):
                task.cancel()
            await asyncio.gather(feeding, reading, return_exceptions=True)
            for _, writer in streams:
                writer.transport.abort()
        if ended == "itself" and ends[3].recv(1) != b"1":
            raise ConfigError(_refusal(errors.content.decode(errors="replace").strip()[-400:]))
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
            raise ConfigError(_refusal(found or f"the self-test ended by {outcome.ended} with {outcome.code}"))


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


def _may_mount(bwrap: str) -> bool:
    """Whether root may mount here; in a container it often may not."""
    return subprocess.run([bwrap, "--dev-bind", "/", "/", "true"], capture_output=True).returncode == 0


def _interpreter(python: str) -> tuple[str, list[str]]:
    """Returns the interpreter's path, and the folders that it reads."""
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
        f"rewards.functions: builtin code: this machine cannot hold untrusted code: {found}. It needs bubblewrap (apt install "
        "bubblewrap), and user, network, PID and mount namespaces of an unprivileged user. In a container: run it with "
        "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, or as a virtual machine. Under systemd: the "
        "drop-in of docs/operations.md, Code rewards. On the host: `sysctl user.max_user_namespaces=10000`, on Debian `sysctl "
        "kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; Linux 5.14 "
        "or newer. Nothing was run without isolation"
    )


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
