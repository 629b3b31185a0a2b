"""A machine of its own on which systemd is process 1, in namespaces.

Guarantee: it sees this machine's root through an overlay and writes to memory alone; it has its own processes, network,
/dev and control groups, cannot change the kernel's settings, and loads no unit but systemd's own basic ones and what is
installed on it. When the context ends, nothing of it is left. Where it cannot be made, the test is skipped and says so.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.integration.runs import eventually
from tests.tools import give_up

_SYSTEMD = "/lib/systemd/systemd"
_UNITS = "/run/machine/units"
_BASIC = (
    "sysinit.target basic.target sockets.target shutdown.target network-online.target network.target multi-user.target "
    "local-fs.target slices.target systemd-journald.service"
)
_SOCKETS = "systemd-journald.socket systemd-journald-dev-log.socket"

# In a mount namespace of its own: a control group for the machine, then the other namespaces.
_OUTER = """
mount -t cgroup2 cgroup2 "$BASE/cgroup"
mkdir "$BASE/cgroup/$NAME"
echo $$ > "$BASE/cgroup/$NAME/cgroup.procs"
exec unshare --pid --fork --kill-child --uts --ipc --net --cgroup sh -euc "$INNER"
"""

_INNER = """
root=$BASE/root
mount -t tmpfs -o mode=755 tmpfs "$BASE/memory"
mkdir "$BASE/memory/upper" "$BASE/memory/work"
mount -t overlay -o "lowerdir=/,upperdir=$BASE/memory/upper,workdir=$BASE/memory/work" overlay "$root"
for folder in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$folder"; done
mkdir "$root/dev/pts" "$root/dev/shm"
chmod 1777 "$root/tmp" "$root/dev/shm"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
touch "$root/dev/console"
mount --bind "$BASE/console" "$root/dev/console"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for bind in $BINDS; do
    mkdir -p "$root${bind#*:}"
    mount --bind "${bind%%:*}" "$root${bind#*:}"
    mount -o remount,bind,ro "$root${bind#*:}"
done
mkdir -p "$root$UNITS/sockets.target.wants" "$root/outside"
for unit in $BASIC; do ln -s "/lib/systemd/system/$unit" "$root$UNITS/$unit"; done
for socket in $SOCKETS; do
    ln -s "/lib/systemd/system/$socket" "$root$UNITS/$socket"
    ln -s "../$socket" "$root$UNITS/sockets.target.wants/$socket"
done
cd "$root"
pivot_root . outside
umount --lazy /outside
mount --make-rshared /
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=slipstream SYSTEMD_GENERATOR_PATH=/none \\
    SYSTEMD_UNIT_PATH="/etc/systemd/system:/usr/local/lib/systemd/system:$UNITS" \\
    "$SYSTEMD" --system --unit=basic.target
"""

_REMOVE = 'mount -t cgroup2 cgroup2 "$BASE/cgroup" && find "$BASE/cgroup/$NAME" -depth -type d -exec rmdir {} +'


class Machine:
    """See the module's guarantee.

    Args:
        binds: folders of this machine, by the path at which the other one shall see them, to read.
    """

    def __init__(self, binds: dict[str, Path]) -> None:
        self._binds = binds

    def __enter__(self) -> Self:
        for tool in ("unshare", "nsenter", _SYSTEMD):
            if shutil.which(tool) is None:
                give_up(f"this machine has no {tool}")
        self._base = Path(tempfile.mkdtemp(prefix="sl-machine-"))
        for name in ("cgroup", "memory", "root"):
            (self._base / name).mkdir()
        (self._base / "console").touch()
        self._variables = {
            "PATH": os.environ["PATH"],
            "BASE": str(self._base),
            "NAME": self._base.name,
            "INNER": _INNER,
            "BINDS": " ".join(f"{source}:{target}" for target, source in self._binds.items()),
            "UNITS": _UNITS,
            "BASIC": _BASIC,
            "SOCKETS": _SOCKETS,
            "SYSTEMD": _SYSTEMD,
        }
        with (self._base / "start.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                ["unshare", "--mount", "--propagation=private", "sh", "-euc", _OUTER],
                env=self._variables,
                stdout=log,
                stderr=log,
            )
        try:
            eventually(self._has_booted)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _has_booted(self) -> bool:
        if self._unshare.poll() is not None:
            reason = (self._base / "start.log").read_text().strip().splitlines()[-1:]
            self._close()
            give_up(f"this machine does not let us boot systemd in a namespace: {' '.join(reason)}")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        if not children:
            return False
        self._init = int(children[0])
        return (
            "systemd" in Path(f"/proc/{self._init}/comm").read_text()
            and self.run("systemctl", "is-active", "basic.target", check=False) == "active"
        )

    def _close(self) -> None:
        self._unshare.kill()  # --kill-child: and process 1 with it, and the kernel everything else
        self._unshare.wait(60)
        command = ["unshare", "--mount", "--propagation=private", "sh", "-euc", _REMOVE]
        eventually(lambda: subprocess.run(command, env=self._variables, capture_output=True).returncode == 0)
        shutil.rmtree(self._base)

    def path(self, path: str) -> Path:
        """Where a file of the machine can be read and written from outside."""
        return Path(f"/proc/{self._init}/root{path}")

    def run(self, *command: str, check: bool = True) -> str:
        """What a command says that root gives on the machine."""
        entered = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]
        done = subprocess.run(
            [*entered, "--root", "--wdns=/", *command],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,  # the start of a unit returns when its daemon is ready
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-5000:]}")
        return done.stdout.strip()
