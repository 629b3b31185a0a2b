"""When producers are added and taken away: by hand, over recorded loads, and over every pair of speeds."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.runtime.metrics import Status
from slipstream.status.daemons import Answer
from slipstream_extras.ray.scaling import BUSY_ENOUGH, IDLES_AT_MOST, History, Load, Looks, answers, decide
from tests.unit.slipstream.status.builders import SAID
from tests.unit.slipstream_extras.ray.builders import report

WINDOW_S = 60.0
RECORDED = sorted((Path(__file__).parent / "loads").glob("*.jsonl"))


def load(at: float, wait: float | None, idle: float | None, producers: int = 4, *, room: bool = True) -> Load:
    return Load(at, WINDOW_S, producers, wait, idle, room)


def run(loads: Iterator[Load] | list[Load], least: int = 1, most: int = 10) -> list[tuple[float, int]]:
    """When the number was changed, and how."""
    history, changes = History(), []
    for now in loads:
        decision = decide(now, history, least, most)
        history = decision.history
        if decision.change:
            changes.append((now.at, decision.change))
    return changes


def every_5_s(wait: float, idle: float, until: float = 600.0, **others: object) -> list[Load]:
    return [load(at, wait, idle, **others) for at in range(0, int(until), 5)]  # type: ignore[arg-type]


def test_one_is_added_after_a_window_of_waiting_and_the_next_two_windows_later() -> None:
    assert run(every_5_s(0.3, 0.0, 400)) == [(60, 1), (180, 1), (300, 1)]


def test_one_is_taken_away_while_the_others_have_time_to_spare() -> None:
    assert run(every_5_s(0.0, 0.4, 200)) == [(60, -1), (180, -1)]
    assert run(every_5_s(0.0, 0.3, 200)) == [], "4 * 0.7 / 3 = 0.93 would be too busy"
    assert run(every_5_s(0.0, 0.37, 130)) == [(60, -1)], "4 * 0.63 / 3 = 0.84"


@pytest.mark.parametrize(
    ("wait", "idle", "others"),
    [
        (0.3, 0.3, {}),  # both wait: for the staleness, not for each other
        (0.07, 0.0, {}),
        (0.3, 0.0, {"room": False}),
        (0.3, 0.0, {"producers": 10}),
        (0.0, 1.0, {"producers": 1}),
        (None, 0.0, {}),
        (0.3, None, {}),
        (0.3, 0.0, {"producers": 0}),
    ],
)
def test_nothing_is_done_without_a_reason_or_against_the_bounds(wait, idle, others) -> None:
    assert run(every_5_s(wait, idle, **others)) == []


def test_a_condition_that_comes_and_goes_within_a_window_is_none() -> None:
    assert run([load(at, 0.3 if at % 50 else 0.0, 0.0) for at in range(0, 1000, 5)]) == []


def test_the_reason_has_the_numbers() -> None:
    text = decide(load(0, 0.31, 0.02), History(), 1, 10).why
    assert text == "the trainer waits 31% of its time for rollouts, 4 producers idle 2%"
    assert decide(load(0, 0.31, 0.02), History(), 1, 4).why.endswith("; producers.max is 4")
    assert decide(load(0, 0.31, 0.02, room=False), History(), 1, 9).why.endswith("; nothing is free for one more")
    assert decide(load(0, 0.0, 0.5), History(), 1, 9).why.endswith("4 producers idle 50%, 3 would be busy 67%")


def test_turning_round_takes_twice_as_long_each_time() -> None:
    """Whatever is measured: this load asks for the other direction as soon as it got its way."""
    history, at = History(), 0.0
    changes: list[float] = []
    while len(changes) < 6:
        waits = len(changes) % 2 == 0
        decision = decide(load(at, 0.5, 0.0) if waits else load(at, 0.0, 0.9), history, 1, 10)
        history = decision.history
        if decision.change:
            changes.append(at)
        at += 5
    pauses = [after - before for before, after in pairwise(changes)]
    assert pauses == [120, 240, 480, 960, 1920]


def pipeline(need: Callable[[float], float], producers: int, noise: float, seconds: int, seed: int = 0) -> list[int]:
    """The numbers of producers over time of a trainer that consumes what `need(at)` producers make."""
    chance, history, numbers = random.Random(seed), History(), []
    for at in range(0, seconds, 5):
        supply = producers / need(at)
        wait, idle = max(0.0, 1 - supply), max(0.0, 1 - 1 / supply)
        shaken = [min(1.0, max(0.0, share + chance.uniform(-noise, noise))) for share in (wait, idle)]
        decision = decide(load(at, shaken[0], shaken[1], producers), history, 1, 64)
        history, producers = decision.history, producers + decision.change
        numbers.append(producers)
    return numbers


def turns(numbers: list[int]) -> int:
    moves = [after - before for before, after in pairwise(numbers) if after != before]
    return sum(a != b for a, b in pairwise(moves))


@pytest.mark.long
@given(need=st.floats(0.3, 30), producers=st.integers(1, 40), noise=st.floats(0, 0.02), seed=st.integers(0, 99))
def test_a_steady_load_is_followed_without_a_turn_and_then_left_alone(need, producers, noise, seed) -> None:
    numbers = pipeline(lambda at: need, producers, noise, 9000, seed)
    assert turns(numbers) == 0
    settled = numbers[-1]
    assert numbers[-300:] == [settled] * 300
    enough = need * (1 - 0.1 - noise) <= settled + 1e-9
    assert enough, "the trainer does not wait"
    assert settled <= max(producers if need > producers else 0, need / BUSY_ENOUGH + 2 / (1 - IDLES_AT_MOST))


def test_a_load_that_grows_and_falls_is_followed() -> None:
    """Long completions for two hours in the middle of the run."""
    numbers = pipeline(lambda at: 8 if 7200 <= at < 14400 else 3, 3, 0.02, 30000)
    assert numbers[1000] == 3
    assert numbers[2700] in (8, 7)
    assert numbers[-1] in (3, 4)
    assert turns(numbers) == 1


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_loads_do_not_oscillate(file: Path) -> None:
    """The name says how many producers there were, and what the decider is to do with that load."""
    loads = [Load(**json.loads(line)) for line in file.read_text().splitlines()]
    changes = run(loads, 1, 100)
    expected = {"grow": {1}, "shrink": {-1}, "stay": set()}[file.stem.split("-")[-1]]
    assert {change for _, change in changes} == expected


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


@pytest.mark.long
def test_the_window_grows_with_the_steps_and_the_number_of_looks_does_not() -> None:
    looks = Looks()
    for at in range(0, 4000, 5):  # a step takes 100 s, 25 of which are waited for
        done = at // 100
        looks.add(at, look(1000 + at, 25 * done, 75 * done, 0.0, float(at), steps=done))
        load = looks.load(1, room=True)
    assert load.window_s == pytest.approx(500, rel=0.3)
    assert load.wait == pytest.approx(0.25)
    assert len(looks._kept) < 50
