"""A wait of the main thread: never silent, never endless, ended by whatever makes it pointless."""

import pytest

from consumer.waiting import Limit, StopRequested, WaitPolicy
from protocol.errors import JournalError, StalledError
from tests.unit.consumer.builders import Clock


def never() -> None:
    return None


def waits(said: list[str], check: object = never, stall_timeout_s: float = 60.0) -> WaitPolicy:
    return WaitPolicy(check=check, say=said.append, stall_timeout_s=stall_timeout_s)


def test_the_first_result_ends_the_wait_and_is_returned(clock: Clock) -> None:
    answers = iter([None, None, 0])  # what is false is a result too
    said: list[str] = []
    assert waits(said).wait_until(lambda: next(answers), "rollouts", str, pause_s=0.5) == 0
    assert clock.now == 1001.0, "two pauses, none after the last attempt"
    assert said == []


def test_it_says_every_ten_seconds_for_what_it_waits_and_why(clock: Clock) -> None:
    said: list[str] = []
    polls = iter(range(1000))
    waits(said).wait_until(
        lambda: "done" if clock.now > 1035 else None, "rollouts", lambda: f"{next(polls)} leases out", pause_s=1.0
    )
    assert said == [
        "waiting for rollouts (11 s): 0 leases out",
        "waiting for rollouts (22 s): 1 leases out",
        "waiting for rollouts (33 s): 2 leases out",
    ]


def test_it_gives_up_after_the_stall_timeout_and_names_it(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    with pytest.raises(StalledError) as caught:
        waits(said, stall_timeout_s=25.0).wait_until(never, "room on the disk", lambda: "nobody deletes", pause_s=0.25)
    assert clock.now == 1025.25
    assert "25 s for room on the disk without progress (pipeline.stall_timeout_s): nobody deletes" in str(caught.value)
    assert caught.value.exit_code == 75
    assert len(said) == 2
    assert "in wait_until" in caplog.text, "where the threads stand"


def test_a_wait_with_a_limit_of_its_own_names_the_key_of_that(clock: Clock) -> None:
    with pytest.raises(StalledError, match=r"10 s for the GPU .*\(4 x pipeline\.gpu_handover_s\)") as caught:
        waits([], stall_timeout_s=25.0).wait_until(
            never, "the GPU", str, pause_s=0.25, limit=Limit(10.0, "4 x pipeline.gpu_handover_s")
        )
    assert "stall_timeout_s" not in str(caught.value)
    assert clock.now == 1010.25


def test_progress_gives_a_wait_its_time_anew(clock: Clock) -> None:
    end = clock.now + 100
    assert waits([], stall_timeout_s=25.0).wait_until(
        lambda: clock.now >= end or None, "rollouts", str, pause_s=1.0, progress=lambda: clock.now // 20
    )


def test_every_wait_has_the_whole_timeout(clock: Clock) -> None:
    waiting = waits([], stall_timeout_s=25.0)
    for _ in range(3):
        end = clock.now + 20
        assert waiting.wait_until(lambda end=end: clock.now >= end or None, "rollouts", str, pause_s=1.0)


@pytest.mark.parametrize("reason", [StopRequested(), JournalError("journal.sqlite is damaged")])
def test_what_check_raises_ends_the_wait(clock: Clock, reason: Exception) -> None:
    def check() -> None:
        if clock.now >= 1005:
            raise reason

    with pytest.raises(type(reason)) as caught:
        waits([], check).wait_until(never, "rollouts", str, pause_s=0.25)
    assert caught.value is reason
    assert clock.now == 1005


def test_something_that_is_there_is_taken_before_anything_is_checked(clock: Clock) -> None:
    def check() -> None:
        raise StopRequested

    assert waits([], check).wait_until(lambda: "a checkpoint", "room", str) == "a checkpoint"
