"""Small file systems for tests that fill, cut or copy them.

Guarantee: whatever a context manager mounted is unmounted when it ends, also after a failure, and nothing of it stays; where
the machine refuses to mount, the test is skipped and says so.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def _mount(*arguments: str) -> None:
    try:
        _run("mount", *arguments)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"this machine does not let us mount: {reason.strip().splitlines()[0]}")


@contextlib.contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    folder.mkdir()
    _mount(*arguments, str(folder))
    try:
        yield folder
    finally:
        try:
            _run("umount", str(folder))
        except subprocess.CalledProcessError:  # somebody still has a file open there
            _run("umount", "--lazy", str(folder))
        folder.rmdir()


def tmpfs(folder: Path, megabytes: int) -> contextlib.AbstractContextManager[Path]:
    """A disk of so many megabytes at `folder`, which must not exist."""
    return _mounted(folder, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs")


def make_ext4(image: Path, megabytes: int) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("this machine has no mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))


def mounted_image(image: Path, folder: Path) -> contextlib.AbstractContextManager[Path]:
    """The file system in `image` at `folder`. What nobody brought to the disk by fsync gets into the image only when the
    kernel writes it back by itself, which takes it 30 seconds for data and here 60 for metadata."""
    return _mounted(folder, "-o", "loop,commit=60", str(image))
