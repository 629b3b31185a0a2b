"""The folder that `--to` names, for the commands that make one.

Guarantee: it appears whole and on the disk, or not at all; a place that cannot be written is refused before the work begins. Of
two commands that make it at once the second is refused.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from protocol.errors import ConfigError, SlipstreamError
from protocol.runtime.files import out_of_space, partial_of, staged
from protocol.runtime.signals import undone


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Give an empty folder, which becomes `to` in the end; `ConfigError` if `to` exists or cannot be written."""
    try:
        if to.exists():
            raise ConfigError(f"--to: {to} exists already; remove it, or choose another folder")
        with ExitStack() as locks:
            _lock(partial_of(to), to, locks)  # no process has the lock of one that a killed command left
            partial = locks.enter_context(staged(to))
            partial.mkdir(parents=True)
            _lock(partial, to, locks)
            locks.enter_context(undone(lambda: shutil.rmtree(partial, ignore_errors=True)))
            try:
                yield partial
            except SlipstreamError:
                raise
            except Exception as error:
                if out_of_space(error, partial):
                    raise ConfigError(f"--to {to}: the disk is full; make room, or choose another place") from error
                raise
    except OSError as error:
        if error.errno is None:  # a library's own, and no refusal of the system's
            raise
        raise ConfigError(_refused(to, error)) from error


def _lock(folder: Path, to: Path, locks: ExitStack) -> None:
    """Lock the folder until `locks` ends; `ConfigError` if another command has it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--to {to}: another command is making it; choose another folder") from None


def _refused(to: Path, error: OSError) -> str:
    about = Path(error.filename or to)
    if {to, partial_of(to)}.isdisjoint((about, *about.parents)):
        return f"{about}: {error.strerror}"
    return f"--to {to}: cannot be written: {error.strerror}; choose another place"
