"""From status documents to a load."""

import msgspec
import pytest

from protocol.runtime.metrics import Status
from slipstream.cluster.scaling import Looks, answers
from slipstream.status.daemons import Answer
from tests.unit.slipstream.cluster.builders import report
from tests.unit.slipstream.status.builders import SAID

STARTED = 800.0


def status(job: str, at: float, **numbers: float) -> Status:
    said = SAID[job]
    info = said.info | {"producer": "producer-1-7-ab"}
    return msgspec.structs.replace(said, at=at, started=STARTED, info=info, numbers=said.numbers | numbers)


def look(
    at: float, waited: float, stepped: float, idled: float, worked: float, steps: int = 30, **now: float
) -> list[Answer]:
    trainer = status("rl-trainer", at, wait_seconds=waited, step_seconds_sum=stepped, step_seconds_count=steps, **now)
    producer = status("rl-producer", at, idle_seconds=idled, busy_seconds=worked, connected=1)
    return answers([report("trainer", status=trainer), report("producer-1", status=producer)], at)


def test_shares_are_over_the_looks() -> None:
    looks = Looks()
    looks.add(0, look(1000, 100, 50, 10, 100))
    looks.add(20, look(1020, 105, 65, 14, 116, steps=32))
    load = looks.load(1, room=True)
    assert (load.at, load.window_s, load.producers, load.room) == (20, 60, 1, True)
    assert load.wait == pytest.approx(5 / 20)
    assert load.idle == pytest.approx(4 / 20)
    assert not looks.load(2, room=True).room, "one that was asked for does not work yet"


def test_what_was_not_measured_long_enough_is_not_known() -> None:
    looks = Looks()
    looks.add(0, look(1000, 100, 50, 10, 100))
    assert looks.load(1, room=True)[2:] == (0, None, None, False)
    looks.add(5, answers([report("trainer", "pausing"), report("producer-1", "new")], 1005.0))
    assert looks.load(1, room=True)[2:4] == (0, None)


def test_a_wait_that_has_not_ended_counts_once_it_fills_the_window() -> None:
    looks = Looks()
    for at in (0, 20, 40, 60, 80):
        looks.add(at, look(1000 + at, 100, 50, 10, 100 + at, waiting_seconds=float(at)))
    assert looks.load(1, room=True).wait == 1.0


def test_the_window_grows_with_the_steps_and_the_number_of_looks_does_not() -> None:
    looks = Looks()
    for at in range(0, 4000, 5):  # a step takes 100 s, 25 of which are waited for
        done = at // 100
        looks.add(at, look(1000 + at, 25 * done, 75 * done, 0.0, float(at), steps=done))
        load = looks.load(1, room=True)
    assert load.window_s == pytest.approx(500, rel=0.3)
    assert load.wait == pytest.approx(0.25)
    assert len(looks._kept) < 50
