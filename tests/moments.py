"""Moments at which Python drops, or a library takes, an exception that a signal handler raises."""

import ctypes
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress


def _come(number: signal.Signals) -> None:
    signal.raise_signal(number)
    for _ in range(1000):  # Python calls the handler between two of these
        pass


def _finalizer(number: signal.Signals) -> None:
    class Dying:
        def __del__(self) -> None:
            _come(number)

    Dying()


def _weakref_callback(number: signal.Signals) -> None:
    class Referred:
        pass

    referred = Referred()
    reference = weakref.ref(referred, lambda _: _come(number))
    del referred
    assert reference() is None


def _callback_of_c(number: signal.Signals) -> None:
    ctypes.CFUNCTYPE(None)(lambda: _come(number))()


def _library(number: signal.Signals) -> None:
    with suppress(BaseException):
        _come(number)


MOMENTS: dict[str, Callable[[signal.Signals], None]] = {
    "finalizer": _finalizer,
    "weakref callback": _weakref_callback,
    "callback of C": _callback_of_c,
    "except BaseException": _library,
}
"""Functions that let a signal come."""
