"""A temporary folder that no kill leaves behind for ever.

Guarantee: `scratch_folder` gives an empty folder to this process alone and removes it in the end; what killed processes of
the same user left on this machine is removed by the next one that starts. A folder in use is never touched: its owner
holds a lock on it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "slipstream-adapters-"
_MIN_AGE_S = 60.0  # younger ones may be about to be locked


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_left(folder)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with _open(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError), _open(folder) as descriptor:  # an OSError: somebody else's, or in use
        state = os.fstat(descriptor)
        if state.st_uid == os.geteuid() and time.time() - state.st_mtime > _MIN_AGE_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
