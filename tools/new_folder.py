"""The folder that `--to` names, for the tools that make one.

Guarantee: it appears whole and on the disk, or not at all; that it cannot be written is said before the work begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ConfigError, SlipstreamError
from protocol.files.space import out_of_space
from protocol.files.staged import staged


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Gives an empty folder, which becomes `to` in the end; `ConfigError` if `to` exists or cannot be written."""
    try:
        if to.exists():
            raise ConfigError(f"--to: {to} exists already; remove it, or choose another folder")
        with staged(to) as partial:
            partial.mkdir(parents=True)
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


def _refused(to: Path, error: OSError) -> str:
    about = Path(error.filename or to)
    if {to, to.with_name(f".{to.name}.partial")}.isdisjoint((about, *about.parents)):
        return f"{about}: {error.strerror}"
    return f"--to {to}: cannot be written: {error.strerror}; choose another place"
