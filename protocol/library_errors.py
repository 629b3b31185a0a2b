"""Exceptions of libraries: whose code raised one, and what it says in one line.

Guarantee: what Slipstream's own code raises stays what it is. What a library or the system raises while it reads what a user gave
is an error for the user, which names the library, what was read, and the reason as a whole.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from protocol.errors import ConfigError, SlipstreamError, access_fix, is_device_failure

_OURS = ("protocol", "replay", "producer", "consumer", "slipstream", "slipstream_extras")
_LONGEST_REASON = 600  # characters


def library_of(error: BaseException) -> str | None:
    """Return the package, not of Python's own, whose code raised this; None for Slipstream's. A package without Python code is
    known by its exceptions."""
    kind = type(error).__module__.partition(".")[0]
    if kind not in _OURS and kind not in sys.stdlib_module_names:
        return kind
    raised, last = error.__traceback__, None
    while raised is not None:
        package = _package(raised.tb_frame)
        if package.isidentifier() and package not in sys.stdlib_module_names:  # a template has a frame of no module
            last = package
        raised = raised.tb_next
    return None if last in _OURS else last


def reason_of(error: BaseException) -> str:
    """Return what an exception says, in one line of a bounded length, with its kind where the words alone do not say enough."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
    return (
        text
        if text and isinstance(error, (ValueError, RuntimeError, ImportError))
        else f"{type(error).__name__}: {text}"
    )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Surround the calls by which libraries read what a user gave. `what` says with its key and place what that is.

    Raises:
        ConfigError: one of them refused, or the system did. A device that has no memory or fails is none of that.
    """
    try:
        yield
    except SlipstreamError:
        raise
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise ConfigError(f"{what}: {reason_of(error)}") from error
        raise ConfigError(f"{what}: {error.filename}: {error.strerror}; {access_fix(error)}") from error
    except Exception as error:
        if is_device_failure(error) or (library := library_of(error)) is None:
            raise
        raise ConfigError(f"{what}: {library}: {reason_of(error)}") from error


def _package(frame: FrameType) -> str:
    spec = frame.f_globals.get("__spec__")  # has the name of a module that is run as the program
    name = getattr(spec, "name", None) or frame.f_globals.get("__name__") or ""
    return str(name).partition(".")[0]
