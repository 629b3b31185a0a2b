"""Temporary folders that are removed even if their processes are killed, and files in memory (`/dev/shm`).

Guarantee: `scratch_folder` gives an empty folder to this process alone and removes it in the end. `common_folder` gives one to
all processes of this user that name it alike, and the last of them removes it. Both first remove folders that killed processes of
this user have left. A folder in use is never touched, because its owners hold a lock on it, nor is a folder of another name, such
as a run in `/tmp/slipstream-mine`. Only its user can read a file in memory, and its name cannot be guessed. No file is written
unless much more memory is free, and a file of another process is read only if it is a plain file of this user, in such a folder
and of the announced size.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.runtime.signals import undone

PREFIX = "slipstream-scratch-"


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a folder of this process in `parent`, by default where temporary files go."""
    parent = parent or Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_if_left(folder)
    folder, lock = _locked_folder(parent)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    try:
        with undone(remove):
            yield folder
    finally:
        remove()
        os.close(lock)


@contextlib.contextmanager
def common_folder(name: str, parent: Path) -> Iterator[Path]:
    """Yield the folder of all processes of this user that give the same `name`. Raises OSError if it cannot be made, or is
    another user's."""
    for left in parent.glob(f"{PREFIX}*"):
        _remove_if_left(left)
    folder = parent / f"{PREFIX}{name}-{os.geteuid()}"
    lock = _join(folder)

    def leave() -> None:
        os.close(lock)
        _remove_if_left(folder)

    try:
        with undone(leave):
            yield folder
    finally:
        leave()


def _join(folder: Path) -> int:
    """The descriptor by which this process is one of those that use `folder`."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # the last one that used it has removed it meanwhile
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_SH)
            state = os.fstat(lock)
            if state.st_uid != os.geteuid() or state.st_mode & 0o077:
                os.close(lock)
                raise PermissionError(f"{folder} is not this user's alone")
            if folder.exists() and os.path.samestat(folder.stat(), state):
                return lock
            os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """A new one, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():  # otherwise another process took it for one that was left, and removed it
                return folder, lock
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, or in use
        descriptor = _open(folder)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def private(path: str, flags: int) -> int:
    """Open a file that no other user may read, for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


ROOT = Path("/dev/shm")  # noqa: S108  Linux' file system in memory
_ROOM_FACTOR = 4  # of a file's size must be free before it is written


class UnusableFileError(Exception):
    """An offered file cannot be read, or is not what was offered. The text says why."""


@dataclass
class SharedMemory:
    folder: Path | None  # None where this machine has no memory for files

    def has_room(self, num_bytes: int) -> bool:
        return self.folder is not None and shutil.disk_usage(self.folder).free >= _ROOM_FACTOR * num_bytes

    def write(self, data: memoryview) -> Path | None:
        """Return the file, or None if there is no room for it."""
        if self.folder is None or not self.has_room(len(data)):
            return None
        path = self.folder / secrets.token_hex(16)
        try:
            with open(path, "xb", buffering=0, opener=private) as file:
                while data:
                    data = data[file.write(data) :]
        except OSError:
            path.unlink(missing_ok=True)
            return None
        return path


NO_MEMORY = SharedMemory(None)


@contextlib.contextmanager
def shared_memory(root: Path | None = None) -> Iterator[SharedMemory]:
    """Make a folder in memory for this process, which is removed at the end of the context."""
    root = root or ROOT
    if not os.access(root, os.W_OK):
        yield NO_MEMORY
        return
    with scratch_folder(root) as folder:
        yield SharedMemory(folder)


def read_offered(path: str, num_bytes: int, root: Path | None = None) -> bytes:
    """The content of a file that another process of this host wrote with `SharedMemory.write`, or `UnusableFileError`."""
    folder = Path(path).parent
    if folder.parent != (root or ROOT) or not folder.name.startswith(PREFIX):
        raise UnusableFileError("it is in no folder of a daemon")
    try:
        with open(path, "rb", opener=_unfollowed) as file:  # Linux reads at most 2 GiB at a time
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
                raise UnusableFileError("it is not a plain file of this user")
            if state.st_size != num_bytes:
                raise UnusableFileError(f"it has {state.st_size} bytes instead of {num_bytes}")
            return file.read(num_bytes)
    except (OSError, ValueError) as error:
        raise UnusableFileError(str(error)) from error


def _unfollowed(path: str, flags: int) -> int:
    """Open without following links, and without blocking on a pipe that has no writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
