"""Handlers of SIGTERM and Ctrl-C for processes of ours.

Guarantee: no handler raises an exception, because Python drops one that comes in a finalizer or in a callback of C, and a library
may take it for its own. A signal ends the process itself, sets a flag at which the work looks, or calls a function of an event
loop. What a process that ends so would leave is removed first, and its log is written. No handler takes a lock, which the code
that it interrupts may have. A process that this one forks does with a signal what any other process does.
"""

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from protocol.errors import ExitCode
from protocol.runtime import logs

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTED_WITHIN_S = 5.0  # on a machine that is not busy a third of a second is enough
_TIDY_S = 5.0
_LOOK_EVERY_S = 0.02
_NAP_S = 0.1

_undoing: list[Callable[[], object]] = []
_taken: set[signal.Signals] = set()


def on_signals(act: Callable[[signal.Signals], object]) -> None:
    """Call `act` at every SIGTERM and Ctrl-C. It interrupts any code of the main thread, so it takes no lock and never raises."""
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: act(signal.Signals(number)))
        _taken.add(number)


def end_on_signals(code: ExitCode) -> None:
    """End this process with `code` at the next signal."""
    on_signals(lambda number: _end(code))


def call_on_signals(loop: "AbstractEventLoop", act: Callable[[signal.Signals], object]) -> None:
    """Have the loop call `act` at every signal. One that comes after the end of the loop ends the process."""

    def hand_on(number: signal.Signals) -> None:
        try:
            loop.call_soon_threadsafe(act, number)
        except RuntimeError:
            _end(ExitCode.INTERRUPTED)

    on_signals(hand_on)


class StopFlag:
    """Set by the first signal. The second one ends the process, as soon as the first one is noted, or has not been within
    `_NOTED_WITHIN_S`.

    Attributes:
        is_noted: returns whether it has. A handler calls it, so it takes no lock.
    """

    def __init__(self) -> None:
        self._requested_at: float | None = None
        self.is_noted: Callable[[], bool] = nothing_to_note
        on_signals(self._handle)

    def __call__(self) -> bool:
        return self._requested_at is not None

    def sleep(self, seconds: float) -> None:
        """Sleep as long. Raises KeyboardInterrupt once the flag is set."""
        until = time.monotonic() + seconds
        while self._requested_at is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_S))
        if self._requested_at is not None:
            raise KeyboardInterrupt

    def _handle(self, _number: signal.Signals) -> None:
        if self._requested_at is None:
            self._requested_at = time.monotonic()
            return
        while not self.is_noted() and time.monotonic() < self._requested_at + _NOTED_WITHIN_S:
            time.sleep(_LOOK_EVERY_S)
        _end(ExitCode.INTERRUPTED)


def nothing_to_note() -> bool:
    return True


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Have `undo` called where a signal ends the process within this context."""
    _undoing.append(undo)
    try:
        yield
    finally:
        _undoing.remove(undo)


def _end(code: ExitCode) -> None:
    """End the process. Another thread tidies up, because this one may have been interrupted while it had a lock."""
    try:
        on_signals(lambda number: os._exit(ExitCode.INTERRUPTED))
        tidied: list[bool] = []
        _thread.start_new_thread(_tidy_up, (tidied,))
        until = time.monotonic() + _TIDY_S
        while not tidied and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
    finally:  # also where the stack or the machine has no room for more
        os._exit(code)


def _tidy_up(tidied: list[bool]) -> None:
    for undo in reversed(_undoing):
        with suppress(Exception):
            undo()
    logs.wait_until_written()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it is closed, or nobody reads it
            stream.flush()
    tidied.append(True)


def _forget() -> None:
    """Take back, in a process that was forked, what is this one's."""
    _undoing.clear()
    for number in _taken:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
