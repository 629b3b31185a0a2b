"""The folder through which policies reach servers.

Guarantee: each client has its own folder in it, in which an adapter appears complete or not at all. Files of a dead client are
found, and no file of a living one: a client holds a lock, and touches a file regularly, because locks do not reach between the
hosts of some network file systems. Times are compared with the clock of the file system alone.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from protocol.errors import ConfigError
from protocol.runtime.files import staged

PREFIX = "slipstream-"
SILENT_S = 120.0  # a client of another host that is silent for longer is dead
_ALIVE = "alive"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClientFolder:
    """The folder `name` of this client in `parent`, which servers see as `server_parent`. Raises OSError if it cannot be made."""

    def __init__(self, parent: Path, server_parent: PurePosixPath, name: str) -> None:
        self.name = name
        self.path = parent / name
        self._parent = parent
        self._server_parent = server_parent
        self._lock = self._join()
        self._changing = threading.Lock()  # threads outlive the tasks that wait for them
        self._is_closed = False

    def server_path(self, adapter: str) -> str:
        return str(self._server_parent / self.name / adapter)

    def put(self, adapter: str, source: Path) -> None:
        """Copy an adapter here, unless all of its files are here already. Raises OSError."""
        target = self.path / adapter
        with self._changing:
            if not self._is_closed and not (target.is_dir() and _sizes(source).items() <= _sizes(target).items()):
                with staged(target, durable=False) as partial:
                    shutil.copytree(source, partial)

    def remove(self, adapter: str) -> None:
        shutil.rmtree(self.path / adapter, ignore_errors=True)

    def beat(self) -> None:
        """Show that this client lives. Called every few seconds. A folder that was removed is made again, or this client would
        count as dead."""
        with self._changing, contextlib.suppress(OSError):  # the file system may be away for a while
            if self._is_closed:
                return
            if not self._is_joined():
                before, self._lock = self._lock, self._join()
                os.close(before)
            os.utime(self._lock)

    def owner_of(self, server_path: str) -> str | None:
        """Return the name of the client in whose folder a server found an adapter; None for a folder outside."""
        place = PurePosixPath(server_path)
        if place.parent.parent == self._server_parent and place.parent.name.startswith(PREFIX):
            return place.parent.name
        return None

    def is_dead(self, client: str) -> bool:
        """Return whether a client has ended without removing its files. A client without a folder has."""
        if client == self.name:
            return False
        folder = self._parent / client
        try:
            descriptor = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # the client may be about to make it
            return not folder.is_dir() or self._is_silent(folder.stat().st_mtime)
        except OSError:
            return False  # the file of another user
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.read(descriptor, 64) == _boot_id() or self._is_silent(os.fstat(descriptor).st_mtime)
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def dead_clients(self) -> list[str]:
        names = [entry.name for entry in os.scandir(self._parent) if entry.name.startswith(PREFIX) and entry.is_dir()]
        return [name for name in names if self.is_dead(name)]

    def remove_client(self, client: str) -> None:
        assert client.startswith(PREFIX)
        shutil.rmtree(self._parent / client, ignore_errors=True)

    def settle(self, adapter: str, name: str) -> str:
        """Move an adapter out of this client's folder, which it outlives, in place of an earlier one of that `name`. Return where
        servers see it. Raises OSError."""
        final = self._parent / name
        with contextlib.suppress(FileNotFoundError):
            final.rename(self.path / f"{secrets.token_hex(4)}.old")  # what is here goes with this client
        (self.path / adapter).rename(final)
        return str(self._server_parent / name)

    def close(self) -> None:
        """Remove the folder. Later calls change nothing."""
        with self._changing:
            self._is_closed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)

    def _join(self) -> int:
        """Open the file whose lock shows that this client lives. The lock is taken before the id is written by which others trust
        it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # another client may be testing it
        os.write(lock, _boot_id())
        return lock

    def _is_joined(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path / _ALIVE), os.fstat(self._lock))
        except FileNotFoundError:
            return False

    def _is_silent(self, touched_at: float) -> bool:
        return os.fstat(self._lock).st_mtime - touched_at > SILENT_S


@contextlib.contextmanager
def client_folder(adapter_dir: str, server_adapter_dir: str | None) -> Iterator[ClientFolder]:
    """Make a client's folder, and remove it in the end. Raises ConfigError if it cannot be made."""
    parent, name = Path(adapter_dir).absolute(), f"{PREFIX}{secrets.token_hex(6)}"
    try:
        folder = ClientFolder(parent, PurePosixPath(server_adapter_dir or parent), name)
    except OSError as error:
        raise ConfigError(
            f"engine_server.adapter_dir: {adapter_dir} cannot be written: {error.strerror}; name a folder that the server reads "
            "and that this user may write to"
        ) from error
    with contextlib.closing(folder):
        yield folder


def _sizes(folder: Path) -> dict[Path, int]:
    """Return the size of each file in it, in bytes."""
    return {path.relative_to(folder): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _boot_id() -> bytes:
    """Return the id of this machine's boot: locks can be trusted among its processes."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""
