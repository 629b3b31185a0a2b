"""Temporary folders that are removed even if their processes are killed.

Guarantee: `scratch_folder` gives an empty folder to this process alone and removes it in the end. `common_folder` gives one to
all processes of this user that name it alike, and the last of them removes it. Both first remove folders that killed processes of
this user have left. A folder in use is never touched, because its owners hold a lock on it, nor is a folder of another name, such
as a run in `/tmp/slipstream-mine`.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "slipstream-scratch-"


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Made in `parent`, by default where temporary files go."""
    parent = parent or Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_if_left(folder)
    folder, lock = _locked_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def common_folder(name: str, parent: Path) -> Iterator[Path]:
    """Of the processes of this user that give the same `name`. Raises OSError if it cannot be made, or is another user's."""
    for left in parent.glob(f"{PREFIX}*"):
        _remove_if_left(left)
    folder = parent / f"{PREFIX}{name}-{os.geteuid()}"
    lock = _join(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        _remove_if_left(folder)


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
    with contextlib.suppress(OSError):  # somebody else's, or in use
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
    """Opens a file that nobody else may read, for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
