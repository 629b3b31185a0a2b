"""The wait for a batch: in order, measured, and ended by whatever ended the run."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from consumer.app import feed as feed_module
from consumer.app.feed import BatchFeed
from consumer.waiting import StopRequested, WaitPolicy
from protocol.errors import NoSignalError, PolicyRefusedError, StalledError
from replay.buffer import RolloutBuffer
from replay.journal.writer import Journal
from tests.unit.consumer.builders import Clock, fill, live_buffer
from tests.unit.replay.builders import FillableJournal


class FakeIntake:
    def __init__(self) -> None:
        self.wakes = 0
        self.checked: list[int | None] = []
        self.refuses_from: float = math.inf

    def wake(self) -> None:
        self.wakes += 1

    def check_refused(self, oldest_usable: int | None = None) -> None:
        self.checked.append(oldest_usable)
        if oldest_usable == self.refuses_from:
            raise PolicyRefusedError("every producer refuses it")

    def describe(self) -> str:
        return "1 producer(s), 2 leases out"


@pytest.fixture(autouse=True)
def polls(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in these alone."""

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: RolloutBuffer, timeout_s: float) -> Any:
            clock.now += timeout_s
            return original(self, 0.0)

        return call

    for name in ("next_batch", "has_batch"):
        monkeypatch.setattr(RolloutBuffer, name, timed(getattr(RolloutBuffer, name)))
    monkeypatch.setattr(feed_module, "time", clock)


def feed(
    replay: RolloutBuffer,
    intake: FakeIntake | None = None,
    said: list[str] | None = None,
    check: Callable[[], None] = lambda: None,
    turns: Any = None,
) -> BatchFeed:
    said = [] if said is None else said
    waits = WaitPolicy(check=check, say=said.append, stall_timeout_s=60.0)
    return BatchFeed(replay, intake or FakeIntake(), waits, turns)


def test_batches_come_in_order_and_the_intake_is_told_of_the_room(journal: Journal) -> None:
    replay, intake = live_buffer(journal, max_staleness=1), FakeIntake()
    lease_ids = fill(replay, 4)
    batches = iter(feed(replay, intake))
    assert [g.lease_id for g in next(batches).groups] == lease_ids[:2]
    assert intake.wakes == 1
    assert [g.lease_id for g in next(batches).groups] == lease_ids[2:]
    assert intake.wakes == 2


def test_the_wait_of_a_batch_is_measured(journal: Journal) -> None:
    replay = live_buffer(journal, max_staleness=1)
    answers = iter([False] * 8)

    def check() -> None:
        if next(answers, None) is None and not replay.depth()["ready"]:
            fill(replay, 4)

    waiting = feed(replay, check=check)
    batches = iter(waiting)
    next(batches)
    assert waiting.wait_s == pytest.approx(9 * 0.25)
    batch = next(batches)
    assert waiting.wait_s == pytest.approx(0.25)
    assert waiting.last is batch


def test_a_run_whose_policy_nobody_serves_ends_when_no_batch_is_left(journal: Journal, clock: Clock) -> None:
    replay, intake = live_buffer(journal, max_staleness=0), FakeIntake()
    fill(replay, 2)
    intake.refuses_from = 1
    batches = iter(feed(replay, intake))
    next(batches)
    assert intake.checked == [None], "while there is a batch, older versions do"
    intake.checked.clear()

    def publish() -> None:
        if clock.now > 1003:
            replay.published(1)

    with pytest.raises(PolicyRefusedError):
        next(iter(feed(replay, intake, check=publish)))
    assert set(intake.checked) == {None, 1}, "the policy of the step is on its way at first"
    assert clock.now < 1005


class Turns:
    """In the place of the trainer's turns on a GPU."""

    def __init__(self, replay: RolloutBuffer) -> None:
        self.replay, self.is_ours, self.happened = replay, False, list[str]()

    def take(self, waits: WaitPolicy) -> None:
        if not self.is_ours:
            self.is_ours = True
            self.happened.append(f"takes it with {self.replay.depth()['ready']} ready")

    def hand_over(self) -> None:
        if self.is_ours:
            self.is_ours = False
            self.happened.append("hands it over")


def test_the_gpu_is_taken_for_the_batches_that_are_ready_and_for_no_longer(journal: Journal, clock: Clock) -> None:
    replay = live_buffer(journal, max_staleness=3)
    turns = Turns(replay)

    def check() -> None:
        if clock.now > 1002 and not replay.depth()["ready"]:
            fill(replay, 4)

    waiting = feed(replay, check=check, turns=turns)
    waiting.await_turn()
    assert turns.happened == ["takes it with 4 ready"]
    batches = iter(waiting)
    next(batches)
    assert waiting.wait_s > 2.0, "it counts from the beginning, not from the turn"
    next(batches)
    assert turns.happened == ["takes it with 4 ready"]
    clock.now = 1000.0
    next(batches)
    assert turns.happened[1:] == ["hands it over", "takes it with 4 ready"]
    waiting.leave()
    assert turns.happened[3:] == ["hands it over"]


def test_a_full_disk_keeps_a_turn_and_groups_too_old_end_it(journal: FillableJournal, clock: Clock) -> None:
    replay = live_buffer(journal)
    turns = Turns(replay)
    fill(replay)
    assert replay.has_batch(0.0)
    assert replay.depth()["ready"] == 2, "nothing was taken"
    journal.full = True

    def check() -> None:
        journal.full = clock.now < 1002

    next(iter(feed(replay, check=check, turns=turns)))
    assert turns.happened == ["takes it with 2 ready"]
    assert not replay.has_batch(0.0)


def test_a_stop_request_ends_the_wait(journal: Journal, clock: Clock) -> None:
    def check() -> None:
        if clock.now > 1005:
            raise StopRequested

    with pytest.raises(StopRequested):
        next(iter(feed(live_buffer(journal), check=check)))
    assert clock.now < 1006


def test_a_stop_request_comes_before_a_batch_that_is_ready(journal: Journal) -> None:
    def check() -> None:
        raise StopRequested

    replay = live_buffer(journal)
    fill(replay)
    with pytest.raises(StopRequested):
        next(iter(feed(replay, check=check)))
    assert replay.depth()["ready"] == 2


def test_a_stall_names_who_waits_for_what(journal: Journal, clock: Clock) -> None:
    said: list[str] = []
    replay = live_buffer(journal)
    replay.lease("p", now=0.0, timeout_s=1.0)
    with pytest.raises(StalledError, match=r"60 s for rollouts .*\(pipeline\.stall_timeout_s\)") as caught:
        next(iter(feed(replay, said=said)))
    assert 1060 < clock.now < 1061
    words = "1 producer(s), 2 leases out; so far 0 groups accepted, 0 without signal, 0 stale"
    assert words in str(caught.value)
    assert said[0].startswith(f"waiting for rollouts (10 s): {words}")
    assert len(said) == 5


def test_a_batch_that_takes_longer_than_the_stall_timeout_is_no_stall_while_groups_come(
    journal: Journal, clock: Clock
) -> None:
    replay = live_buffer(journal, groups_per_step=8, max_staleness=1)
    arrivals = iter(range(1015, 2000, 15))
    due = next(arrivals)

    def check() -> None:
        nonlocal due
        if clock.now >= due:
            due = next(arrivals)
            fill(replay, 1)

    batches = iter(feed(replay, check=check))
    assert len(next(batches).groups) == 8
    assert clock.now > 1000 + 2 * 60, "an accepted group every 15 s, and a stall timeout of 60 s"
    arrivals, due = iter([]), 1e9
    with pytest.raises(StalledError):
        next(batches)


@pytest.mark.parametrize(("bound", "ended_after_s"), [(8, 8 * 20), (None, 60)])
def test_groups_without_signal_are_progress_as_far_as_the_guard_bounds_them(
    journal: Journal, clock: Clock, bound: int | None, ended_after_s: float
) -> None:
    replay = live_buffer(journal, max_staleness=50, max_groups_without_signal=bound)
    due = clock.now + 20

    def check() -> None:
        nonlocal due
        if clock.now >= due:
            due += 20
            fill(replay, 0, dull=1)

    with pytest.raises(NoSignalError):
        next(iter(feed(replay, check=check)))
    assert ended_after_s < clock.now - 1000 < ended_after_s + 1


def test_a_batch_that_the_full_disk_cannot_note_is_cut_when_there_is_room(
    journal: FillableJournal, clock: Clock
) -> None:
    replay = live_buffer(journal)
    lease_ids = fill(replay)
    journal.full = True

    def check() -> None:
        journal.full = clock.now < 1002

    batch = next(iter(feed(replay, check=check)))
    assert [g.lease_id for g in batch.groups] == lease_ids
    assert clock.now == pytest.approx(1002.25)
    assert journal.query("SELECT lease_id, step FROM groups ORDER BY position") == [(lease, 1) for lease in lease_ids]
