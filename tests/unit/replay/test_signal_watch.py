"""A streak of groups without signal ends a run only when it is long enough, and says what the rewards were."""

import pytest

from protocol.errors import DataFailuresError, ExitCode, NoSignalError
from replay.journal.writer import Journal
from replay.rewards import SignalWatch
from tests.unit.replay.builders import buffer, group, lease, offer


def told(watch: SignalWatch) -> str:
    with pytest.raises(NoSignalError) as caught:
        watch.check()
    assert caught.value.exit_code == ExitCode.NO_SIGNAL == 67
    return str(caught.value)


def watch_of(*rewards: float | None, max_groups: int | None = 3) -> SignalWatch:
    watch = SignalWatch(max_groups)
    for reward in rewards:
        watch.note(group("0-0-0-1-s"), reward, has_signal=False)
    return watch


def test_one_group_with_signal_begins_a_new_streak() -> None:
    watch = watch_of(0.0, 0.0)
    watch.check()
    watch.note(group("0-0-0-1-s"), 0.5, has_signal=True)
    watch.note(group("0-0-0-1-s"), 0.0, has_signal=False)
    watch.check()
    assert "last 3 groups" in told(watch_of(0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ((0.0, 0.0, 0.0), "every completion was worth 0, and 50% of the completions were cut"),
        ((0.0, 1.0, None), "completions of a group were worth the same, from 0 in one group to 1 in another"),
    ],
)
def test_the_message_says_what_the_rewards_were(rewards: tuple[float | None, ...], words: str) -> None:
    assert words in told(watch_of(*rewards))


def test_rewards_that_are_all_missing_are_no_lack_of_signal() -> None:
    with pytest.raises(DataFailuresError, match="no completion was scored at all"):
        watch_of(None, None, None).check()


def test_without_a_bound_only_a_stall_asks_and_only_if_there_was_never_signal() -> None:
    watch = watch_of(*[0.0] * 50, max_groups=None)
    watch.check()
    watch.check_stalled(ever_had_signal=True)
    with pytest.raises(NoSignalError, match=r"pipeline\.stall_timeout_s"):
        watch.check_stalled(ever_had_signal=False)
    SignalWatch(1).check_stalled(ever_had_signal=False)  # nothing came: that is a stall


def test_the_buffer_asks_while_there_is_no_batch(journal: Journal) -> None:
    replay = buffer(journal, max_staleness=8, max_groups_without_signal=4)
    for _ in range(3):
        offer(replay, lease(replay), signal=False)
    assert replay.next_batch(0.0) is None
    offer(replay, lease(replay), signal=False)
    with pytest.raises(NoSignalError, match=r"none of the last 4 groups .* \(guards.max_groups_without_signal\)"):
        replay.next_batch(0.0)
    offer(replay, lease(replay))
    offer(replay, lease(replay))
    assert replay.next_batch(0.0) is not None
    assert replay.next_batch(0.0) is None
    replay.check_stalled()
