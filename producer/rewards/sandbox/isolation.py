"""The command that runs a program in bubblewrap.

Guarantee: the program is an ordinary user in namespaces of its own, and sees its interpreter and the system's libraries,
read-only. What bubblewrap cannot bound, `producer.rewards.sandbox.inside` bounds before the program starts.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from producer.rewards.sandbox.filter import system_call_filter
from protocol.errors import ConfigError

_INSIDE = Path(__file__).with_name("inside.py")
ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8"}  # noqa: S108 - the sandbox has its own
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom")  # a shared mapping of /dev/zero is memory that nobody counts
_ISOLATED = [
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--uid", "1000", "--gid", "1000",
    "--die-with-parent", "--new-session", "--cap-add", "CAP_SYS_ADMIN",  # for the mount of `inside.py`
]  # fmt: skip
_AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
_UNTOUCHED_BYTES = 2**27  # what an interpreter reserves and does not use


@dataclass(frozen=True)
class Limits:
    """Limits of one program: seconds, resident bytes of all its processes, bytes of files, and processes and threads."""

    time_s: float = 5.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 64 * 2**20
    processes: int = 8
    output_bytes: int = 2**20


class Isolation:
    """Makes commands for programs with these limits. Raises ConfigError if there is no such interpreter, no bubblewrap or
    no libseccomp.

    Args:
        python: the interpreter, and with it what the programs can read and import. None: this one, without packages.
    """

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
