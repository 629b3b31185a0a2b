"""A full disk is no error: what does not fit is left out, or written later.

Guarantee: only a full disk is passed over; every other error is raised.
"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOTHING_LEFT_BYTES = 2**20


def out_of_space(error: BaseException, folder: Path | None = None) -> bool:
    """Whether `error` came of a full disk. Where it does not say, because not every library passes the error number on, the
    disk of `folder` is asked."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    return folder is not None and shutil.disk_usage(folder).free < _NOTHING_LEFT_BYTES


@contextmanager
def unless_full() -> Iterator[None]:
    """Leaves its body, without an error, where the disk is full."""
    try:
        yield
    except OSError as error:
        if not out_of_space(error):
            raise
