"""The wait for a batch: never silent, never endless, ended by whatever ended the run."""

from typing import Any

import pytest

from consumer import feed as feed_module
from consumer.feed import BatchFeed, StopRequested
from protocol.errors import StalledError
from replay.buffer import RolloutBuffer
from tests.unit.replay.builders import buffer, group


class Clock:
    """Time that passes only in `next_batch`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeIntake:
    def __init__(self) -> None:
        self.num_producers = 1
        self.error: BaseException | None = None
        self.wakes = 0

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def wake(self) -> None:
        self.wakes += 1

    def describe(self) -> str:
        return "1 producer(s) on policy 3, 2 leases out, 0 groups ready"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(feed_module, "time", clock)

    def next_batch(self: RolloutBuffer, timeout_s: float) -> Any:
        clock.now += timeout_s
        return original(self, 0.0)

    original = RolloutBuffer.next_batch
    monkeypatch.setattr(RolloutBuffer, "next_batch", next_batch)
    return clock


def feed(replay: RolloutBuffer, intake: FakeIntake, said: list[str], stop: Any = lambda: False) -> BatchFeed:
    return BatchFeed(replay, intake, stop_requested=stop, say=said.append, stall_timeout_s=60.0)


def offer(replay: RolloutBuffer, count: int = 2) -> None:
    for _ in range(count):
        replay.offer(group(replay.lease("p", now=0.0, timeout_s=1.0).lease_id))


def test_batches_come_in_order_and_the_intake_is_told_of_the_room(clock: Clock) -> None:
    replay, intake = buffer(max_staleness=1), FakeIntake()
    offer(replay, 4)
    batches = iter(feed(replay, intake, []))
    assert [g.group_id for g in next(batches).groups] == ["s-1", "s-2"]
    assert [g.group_id for g in next(batches).groups] == ["s-3", "s-4"]
    assert intake.wakes == 2


def test_the_wait_of_a_batch_is_measured(clock: Clock) -> None:
    replay = buffer()
    answers = iter([False] * 8)

    def stop() -> bool:
        if next(answers, None) is None:
            offer(replay)
        return False

    waiting = feed(replay, FakeIntake(), [], stop)
    next(iter(waiting))
    assert waiting.wait_s == pytest.approx(9 * 0.25)
    assert waiting.last is not None


def test_a_stop_request_ends_the_wait(clock: Clock) -> None:
    with pytest.raises(StopRequested):
        next(iter(feed(buffer(), FakeIntake(), [], lambda: clock.now > 1005)))
    assert clock.now < 1006


def test_a_stop_request_comes_before_a_batch_that_is_ready(clock: Clock) -> None:
    replay = buffer()
    offer(replay)
    with pytest.raises(StopRequested):
        next(iter(feed(replay, FakeIntake(), [], lambda: True)))
    assert replay.depth()["ready"] == 2


def test_a_stall_names_who_waits_for_what(clock: Clock) -> None:
    said: list[str] = []
    with pytest.raises(StalledError) as caught:
        next(iter(feed(buffer(), FakeIntake(), said)))
    assert 1060 < clock.now < 1061
    assert str(caught.value) == (
        "no batch for pipeline.stall_timeout_s=60 s: 1 producer(s) on policy 3, 2 leases out, 0 groups ready; so far {}"
    )
    assert caught.value.exit_code == 75
    assert said[0] == "waiting for rollouts (10 s): 1 producer(s) on policy 3, 2 leases out, 0 groups ready"
    assert len(said) == 5


def test_without_a_producer_it_waits_for_ever_and_says_so(clock: Clock) -> None:
    said: list[str] = []
    intake = FakeIntake()
    intake.num_producers = 0
    with pytest.raises(StopRequested):
        next(iter(feed(buffer(), intake, said, lambda: clock.now > 5000)))
    assert len(said) > 300


def test_the_stall_is_counted_from_the_return_of_a_producer(clock: Clock) -> None:
    intake = FakeIntake()
    intake.num_producers = 0

    def stop() -> bool:
        intake.num_producers = int(clock.now > 1100)
        return False

    with pytest.raises(StalledError):
        next(iter(feed(buffer(), intake, [], stop)))
    assert 1160 < clock.now < 1161


def test_what_ended_the_intake_ends_the_run(clock: Clock) -> None:
    intake = FakeIntake()
    intake.error = OSError("socket gone")
    with pytest.raises(OSError, match="socket gone"):
        next(iter(feed(buffer(), intake, [])))
