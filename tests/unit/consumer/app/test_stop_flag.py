"""Signals to the trainer: the first one asks it to stop, the second one ends it as soon as the first one is in the journal."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from consumer.app import daemon
from protocol.errors import ExitCode


class Ended(BaseException):
    """The process ends here."""


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> Iterator[daemon._StopFlag]:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield daemon._StopFlag()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_second_signal_ends_the_process_and_not_the_first(flag: daemon._StopFlag) -> None:
    assert not flag()
    signal.raise_signal(signal.SIGTERM)
    assert flag()
    with pytest.raises(Ended) as ended:
        signal.raise_signal(signal.SIGINT)
    assert ended.value.args == (ExitCode.INTERRUPTED,)


def test_the_second_signal_waits_until_the_first_one_is_noted_however_slow_the_machine_is(
    flag: daemon._StopFlag,
) -> None:
    noted = threading.Event()
    flag.is_noted = noted.is_set
    signal.raise_signal(signal.SIGINT)
    threading.Timer(1.0, noted.set).start()
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)
    assert noted.is_set()


def test_it_does_not_wait_for_ever(flag: daemon._StopFlag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_NOTED_WITHIN_S", 0.05)
    flag.is_noted = lambda: False
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)
