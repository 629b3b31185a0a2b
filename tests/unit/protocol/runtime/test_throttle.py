"""Throttled lines, on a clock moved by hand."""

import logging
from types import SimpleNamespace

import pytest

from protocol.runtime.logs import Throttle


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=7.0)


@pytest.fixture
def throttle(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> Throttle:
    caplog.set_level(logging.INFO, logger="protocol.test")
    return Throttle(logging.getLogger("protocol.test"), lambda: clock.now)


def test_the_first_few_are_shown_then_one_per_interval_with_the_number_left_out(
    throttle: Throttle, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(8):
        throttle("bad", f"line {number}")
    clock.now += 59.0
    throttle("bad", "line 8")
    clock.now += 1.0
    throttle("bad", "line 9")
    throttle("bad", "line 10")
    clock.now += 60.0
    throttle("bad", "line 11")
    clock.now += 60.0
    throttle("bad", "line 12")
    shown = [f"line {number}" for number in range(5)]
    shown.append("line 9 (4 more of this kind were left out)")
    shown.append("line 11 (1 more of this kind were left out)")
    assert caplog.messages == [*shown, "line 12"]
    assert [vars(record)["fields"]["num_left_out"] for record in caplog.records] == [0] * 5 + [4, 1, 0]


def test_kinds_do_not_hide_each_other(throttle: Throttle, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(6):
        throttle("frequent", "again")
    throttle("rare", "once", logging.INFO)
    assert caplog.messages == ["again"] * 5 + ["once"]
    assert caplog.records[-1].levelname == "INFO"


def test_what_is_left_out_is_there_for_debugging(throttle: Throttle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="protocol.test")
    for number in range(7):
        throttle("bad", f"line {number}")
    assert caplog.messages == [f"line {number}" for number in range(7)]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 5 + ["DEBUG"] * 2
