"""Files in memory (`/dev/shm`), for scratch and for policies that daemons of one host share.

Guarantee: only its user can read a file, nobody can guess its name, and it is removed with its folder, at the latest when the
next daemon starts after a kill. No file is written unless much more memory is free. A file of another process is read only if
it is a plain file of this user, in such a folder and of the announced size.
"""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.files.scratch import PREFIX, private, scratch_folder

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
        """Returns the file, or None if there is no room for it."""
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
    """This process's own folder in memory, while the context lasts."""
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
        with open(path, "rb", buffering=0, opener=_unfollowed) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
                raise UnusableFileError("it is not a plain file of this user")
            if state.st_size != num_bytes:
                raise UnusableFileError(f"it has {state.st_size} bytes instead of {num_bytes}")
            return file.read(num_bytes)
    except (OSError, ValueError) as error:
        raise UnusableFileError(str(error)) from error


def _unfollowed(path: str, flags: int) -> int:
    """Opening a pipe that nobody writes to must not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
