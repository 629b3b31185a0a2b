"""A file or folder that appears under its name complete and on the disk, or not at all, and a full disk that is no error.

Guarantee: whenever the process or the machine dies, the name has its old content or all of the new content. A file is replaced in
one rename. A folder needs two, and a crash between them leaves the old folder under another name, from which `restore_folder`
restores it. `ignore_disk_full` passes over a full disk alone; every other error is raised.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOTHING_LEFT_BYTES = 2**20


def out_of_space(error: BaseException, folder: Path | None = None) -> bool:
    """Return whether `error` came of a full disk. Some libraries drop the error number; then the disk of `folder` is asked."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    return folder is not None and shutil.disk_usage(folder).free < _NOTHING_LEFT_BYTES


@contextmanager
def ignore_disk_full() -> Iterator[None]:
    """Leave its body, without an error, where the disk is full."""
    try:
        yield
    except OSError as error:
        if not out_of_space(error):
            raise


@contextlib.contextmanager
def staged(final: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give a path at which nothing is, for the body to make a file or a folder there, and moves that to `final` in the end.
    An error in the body leaves `final` as it was. If it is not `durable`, a crash of the machine may take it."""
    partial = partial_of(final)
    _remove(partial)  # what a killed process left, as `restore_folder` does
    restore_folder(final)
    try:
        yield partial
        settle(partial, final, durable=durable)
    finally:
        _remove(partial)
        restore_folder(final)


def settle(partial: Path, final: Path, *, durable: bool = True) -> None:
    """Bring what is at `partial` to the disk and moves it to `final`. A folder that it replaces is left for `restore_folder`."""
    if durable:
        sync_all(partial)
    if partial.is_dir() and final.is_dir():
        final.rename(aside(final))
    partial.rename(final)
    if durable:
        sync(final.parent)


def restore_folder(final: Path) -> None:
    """Take back the folder that a crash between the two renames has left aside, or removes one that was replaced."""
    old = aside(final)
    if old.is_dir() and not final.exists():
        old.rename(final)
    _remove(old)


def partial_of(final: Path) -> Path:
    """The place of a file or folder until it is whole."""
    return final.with_name(f".{final.name}.partial")


def aside(final: Path) -> Path:
    """The place of a folder while another folder takes its name."""
    return final.with_name(f".{final.name}.old")


def sync_all(place: Path) -> None:
    """Bring a file, or a folder with everything in it, to the disk, a folder after what is in it."""
    for path in (*sorted(place.rglob("*"), reverse=True), place):
        sync(path)


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.unlink()
