"""The sandbox: runs untrusted Python programs with bubblewrap.

Guarantee: the program is an ordinary user in namespaces of its own, and sees its interpreter and the system's libraries,
read-only. `sandbox_inside.py` bounds what bubblewrap cannot, before the program starts. The filter of system calls
refuses foreign ABIs, calls that only an attack on the kernel needs, sockets of other families than unix, new namespaces, and
memory that no process holds as resident, because no limit would count it.

`Sandbox.run` returns within `time_s` and a little from the program's start, which a busy machine may delay by a minute at most.
By then its keeper (`protocol.runtime.child`) has killed every process of the program. Output beyond `output_bytes` ends the
program. `run` holds no lock and no thread.
"""

import asyncio
import contextlib
import copy
import ctypes
import errno
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from protocol.errors import ConfigError
from protocol.runtime.child import KeptProcess

_INSIDE = Path(__file__).with_name("sandbox_inside.py")
ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8"}  # noqa: S108 - the sandbox has its own
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom")  # a shared mapping of /dev/zero is memory that is counted nowhere
_ISOLATED = [
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--uid", "1000", "--gid", "1000",
    "--die-with-parent", "--new-session", "--cap-add", "CAP_SYS_ADMIN",  # for the mount of `inside.py`
]  # fmt: skip
_AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
_UNTOUCHED_BYTES = 2**27  # what an interpreter reserves and does not use

_REFUSED = """ptrace mount umount2 pivot_root chroot swapon reboot init_module delete_module finit_module kexec_load add_key
    request_key keyctl unshare setns perf_event_open bpf userfaultfd process_vm_readv process_vm_writev io_uring_setup open_tree
    move_mount fsopen fsmount mount_setattr quotactl acct open_by_handle_at name_to_handle_at
    memfd_create memfd_secret shmget shmat msgget semget mq_open vmsplice"""
_NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)  # of clone
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 1, 0x20, 0x40000
_AF_UNIX = 1

_KILL_PROCESS, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x50000
_ACTION_FOR_FOREIGN_ABIS = 2  # SCMP_FLTATR_ACT_BADARCH
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_OWN_BYTES = 2**25  # resident: the keeper and bubblewrap
_POLL_S = 0.05
_START_S = 60.0
_SELF_TEST_S = 60.0  # at least, because a machine that loads a model at the same time is slow

Ended = Literal["itself", "time", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """Limits of one program: seconds, resident bytes of all its processes, bytes of files, and processes and threads."""

    time_s: float = 5.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 64 * 2**20
    processes: int = 8
    output_bytes: int = 2**20


class Isolation:
    """Makes commands for programs with these limits. `python` is the interpreter, and with it what they can read and import;
    None: this one, without packages. Raises ConfigError if there is no such interpreter, no bubblewrap or no libseccomp."""

    def __init__(self, limits: Limits, python: str | None = None) -> None:
        self._limits = limits
        self._python, readable = _interpreter(python or sys._base_executable)  # type: ignore[attr-defined]
        self._flags = ["-I", "-X", "utf8"] + ([] if python else ["-S"])
        self._readable = [place for place in dict.fromkeys([*readable, *_SYSTEM]) if os.path.exists(place)]
        self._bwrap = shutil.which("bwrap") or ""
        if not self._bwrap:
            raise refusal("there is no bwrap")
        self._filter = system_call_filter().hex()
        self._is_root = os.geteuid() == 0
        self._may_mount = self._is_root and _may_mount(self._bwrap)

    def command(self, main: int, ready: int) -> list[str]:
        """Return the command of a program that is read from descriptor `main`. A byte in `ready` reports that it is about to
        start.

        Root becomes the user `nobody`, so that the program owns no file of root's and its processes are counted. Folders that
        `nobody` may not read, such as an interpreter in /root, are mounted elsewhere before.
        """
        sources = {place: place for place in self._readable}
        before: list[str] = []
        if self._is_root:
            before = _AS_NOBODY
            if self._may_mount:
                sources = {place: f"/tmp/{number}" for number, place in enumerate(self._readable)}  # noqa: S108
                moved = [word for place, source in sources.items() for word in ("--ro-bind", place, source)]
                before = [self._bwrap, "--die-with-parent", "--dev-bind", "/", "/", "--tmpfs", "/tmp", *moved, *before]  # noqa: S108
        limits = self._limits
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


def _may_mount(bwrap: str) -> bool:
    """Return whether root may mount here; in a container it often may not."""
    return subprocess.run([bwrap, "--dev-bind", "/", "/", "true"], capture_output=True).returncode == 0


def _interpreter(python: str) -> tuple[str, list[str]]:
    """Return the interpreter's path, and the folders that it reads."""
    ask = (
        "import json, os, sys\n"
        "print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)]))"
    )
    try:
        output = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"rewards.functions: options.python={python} is no Python interpreter: {error}") from error
    executable, prefix, base, real = json.loads(output)
    return executable, [prefix, base, str(Path(executable).parent), str(Path(real).parent)]


def refusal(found: str) -> ConfigError:
    """The error for a machine that cannot isolate a program."""
    return ConfigError(
        f"rewards.functions: builtin code: this machine cannot hold untrusted code: {found}. It needs bubblewrap (apt install "
        "bubblewrap), and user, network, PID and mount namespaces of an unprivileged user. In a container: run it with "
        "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, or as a virtual machine. Under systemd: the "
        "drop-in of docs/operations.md, Code rewards. On the host: `sysctl user.max_user_namespaces=10000`, on Debian `sysctl "
        "kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; Linux 5.14 "
        "or newer. Nothing was run without isolation"
    )


class _Comparison(ctypes.Structure):
    """Compares an argument of a call: its index, the operator, and two values."""

    _fields_ = (("index", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _all_set(index: int, flags: int) -> _Comparison:
    return _Comparison(index, _MASKED_EQUAL, flags, flags)


@cache
def system_call_filter() -> bytes:
    """The filter as the kernel takes it (classic BPF). Raises ConfigError if libseccomp is not installed, or too old to
    know all calls."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise ConfigError(
            f"rewards.functions: builtin code needs libseccomp ({error}); install it: apt install libseccomp2"
        ) from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def refuse(name: str, *comparisons: _Comparison, error: int = errno.EPERM) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        array = (_Comparison * len(comparisons))(*comparisons)
        action = ctypes.c_uint32(_ERRNO | error)
        if number == -1 or library.seccomp_rule_add_array(context, action, number, len(comparisons), array) != 0:
            raise ConfigError(
                f"rewards.functions: builtin code needs libseccomp 2.5.3 or newer: {name} is unknown to it"
            )

    try:
        library.seccomp_attr_set(context, _ACTION_FOR_FOREIGN_ABIS, ctypes.c_uint32(_KILL_PROCESS))
        for name in _REFUSED.split():
            refuse(name)
        refuse("clone3", error=errno.ENOSYS)  # its flags are in memory; the C library takes clone then
        for flag in _NAMESPACE_FLAGS:
            refuse("clone", _all_set(0, flag))
        refuse("mmap", _all_set(3, _MAP_SHARED | _MAP_ANONYMOUS))
        refuse("mmap", _all_set(3, _MAP_HUGETLB))
        refuse("socket", _Comparison(0, _NOT_EQUAL, _AF_UNIX, 0))
        with os.fdopen(os.memfd_create("filter"), "w+b") as file:
            library.seccomp_export_bpf(context, file.fileno())
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


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
        """Run `program` as a script, which has `channel` under the same descriptor; it is closed on this side. Raise
        ConfigError if the isolation could not be set up, and TimeoutError if that takes too long, so that nothing was run."""
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
            ended = await self._until_it_ends(process, reading, ready, (output, errors))
            status = await asyncio.shield(process.terminate())
            if ended != "itself":
                await asyncio.wait([reading], timeout=_POLL_S)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if ended == "itself" and ready.recv(1) != b"1":
            raise refusal(errors.decode(errors="replace").strip()[-400:])
        code = -9 if status is None else status
        return Outcome(128 - code if code < 0 else code, bytes(output), bytes(errors), ended)

    async def _collect(self, end: socket.socket, into: bytearray) -> None:
        """Read to the end of the output, and drop the part beyond the limit."""
        loop = asyncio.get_running_loop()
        while part := await loop.sock_recv(end, 2**16):
            into += part[: self.limits.output_bytes - len(into)]

    async def _until_it_ends(
        self,
        process: KeptProcess,
        reading: "asyncio.Future[Any]",
        ready: socket.socket,
        collected: tuple[bytearray, ...],
    ) -> Ended:
        deadline, has_started = time.monotonic() + _START_S, False
        while not (await asyncio.wait({reading}, timeout=_POLL_S))[0]:
            if not has_started and (has_started := _has_byte(ready)):
                deadline = time.monotonic() + self.limits.time_s
            if any(len(each) >= self.limits.output_bytes for each in collected):
                return "output"
            if time.monotonic() > deadline:
                if not has_started:
                    raise TimeoutError(f"the sandbox did not start within {_START_S:g} s: the machine is too busy")
                return "time"
            if process.resident_bytes() > self.limits.memory_bytes + _OWN_BYTES:
                return "memory"
        return "itself"

    async def check(self) -> None:
        """Run a self-test that tries to get around the isolation. Raise ConfigError if the machine cannot isolate it;
        the message has the fix."""
        patient = copy.copy(self)
        patient.limits = replace(self.limits, time_s=max(_SELF_TEST_S, self.limits.time_s))
        try:
            outcome = await patient.run(_SELF_TEST.format(processes=self.limits.processes))
        except TimeoutError as error:
            raise refusal(str(error)) from None
        if outcome.output != b"held" or outcome.code != 0:
            found = (outcome.errors or outcome.output).decode(errors="replace").strip()[-400:]
            raise refusal(found or f"the self-test ended by {outcome.ended} with {outcome.code}")


def _has_byte(ready: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return ready.recv(1, socket.MSG_PEEK) == b"1"
    return False


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
            time.sleep(90)
            os._exit(0)
        number += 1
except OSError:
    print("held", end="", flush=True)
else:
    raise SystemExit("processes are not limited (Linux 5.14 or newer limits them)")
"""
