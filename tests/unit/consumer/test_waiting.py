"""A wait of the main thread: never silent, never endless, ended by whatever makes it pointless."""

import pytest

from consumer.waiting import Patience, StopRequested
from protocol.errors import JournalError, StalledError
from tests.unit.consumer.builders import Clock


def never() -> None:
    return None


def patience(said: list[str], check: object = never, stall_timeout_s: float = 60.0) -> Patience:
    return Patience(check=check, say=said.append, stall_timeout_s=stall_timeout_s)


def test_the_first_result_ends_the_wait_and_is_returned(clock: Clock) -> None:
    answers = iter([None, None, 0])  # what is false is a result too
    said: list[str] = []
    assert patience(said).wait_until(lambda: next(answers), "rollouts", str, pause_s=0.5) == 0
    assert clock.now == 1001.0, "two pauses, none after the last attempt"
    assert said == []


def test_it_says_every_ten_seconds_for_what_it_waits_and_why(clock: Clock) -> None:
    said: list[str] = []
    polls = iter(range(1000))
    patience(said).wait_until(
        lambda: "done" if clock.now > 1035 else None, "rollouts", lambda: f"{next(polls)} leases out", pause_s=1.0
    )
    assert said == [
        "waiting for rollouts (11 s): 0 leases out",
        "waiting for rollouts (22 s): 1 leases out",
        "waiting for rollouts (33 s): 2 leases out",
    ]


def test_it_gives_up_after_the_stall_timeout_and_names_it(clock: Clock) -> None:
    said: list[str] = []
    with pytest.raises(StalledError) as caught:
        patience(said, stall_timeout_s=25.0).wait_until(
            never, "room on the disk", lambda: "nobody deletes", pause_s=0.25
        )
    assert clock.now == 1025.25
    assert str(caught.value) == "no room on the disk for pipeline.stall_timeout_s=25 s: nobody deletes"
    assert caught.value.exit_code == 75
    assert len(said) == 2


def test_every_wait_has_the_whole_timeout(clock: Clock) -> None:
    waiting = patience([], stall_timeout_s=25.0)
    for _ in range(3):
        end = clock.now + 20
        assert waiting.wait_until(lambda end=end: clock.now >= end or None, "rollouts", str, pause_s=1.0)


@pytest.mark.parametrize("reason", [StopRequested(), JournalError("journal.sqlite is damaged")])
def test_what_check_raises_ends_the_wait(clock: Clock, reason: Exception) -> None:
    def check() -> None:
        if clock.now >= 1005:
            raise reason

    with pytest.raises(type(reason)) as caught:
        patience([], check).wait_until(never, "rollouts", str, pause_s=0.25)
    assert caught.value is reason
    assert clock.now == 1005


def test_something_that_is_there_is_taken_before_anything_is_checked(clock: Clock) -> None:
    def check() -> None:
        raise StopRequested

    assert patience([], check).wait_until(lambda: "a checkpoint", "room", str) == "a checkpoint"
