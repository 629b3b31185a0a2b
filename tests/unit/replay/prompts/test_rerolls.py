"""Who returns after a failure and who rests after a success; when, in which order, and how often."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.groups import GroupShape, RolloutGroup
from replay.journal.writer import Journal
from replay.prompts.ledger import parse_lease_id
from replay.prompts.rerolls import Judgement, Key, RerollQueue, RerollRules
from tests.unit.replay.builders import buffer, cut, delivery, group_message, lease, offer, resumed

NAN = math.nan


def scored(*rewards: tuple[float, ...]) -> RolloutGroup:
    """One row per completion."""
    n = len(rewards)
    shape = GroupShape(n, len(rewards[0]), 4, 10)
    return shape.parse(
        group_message(
            completion_lengths=np.ones(n, "<i4").tobytes(),
            completion_ids=np.ones(n, "<i4").tobytes(),
            logprobs=np.zeros(n, "<f4").tobytes(),
            truncated=bytes(n),
            rewards=np.array(rewards, "<f4").tobytes(),
        )
    )


def queue(*keys: Key, max_share: float = 1.0, max_pending: int = 8, version: int = 0) -> RerollQueue:
    result = RerollQueue(max_share=max_share, max_pending=max_pending)
    for key in keys:
        assert result.defer(key, version)
    return result


def taken(waiting: RerollQueue, version: int, count: int = 8) -> list[Key]:
    """Those that return, if nothing but the share holds them back."""
    found = []
    for _ in range(count):
        key = waiting.next_due(version)
        if key is not None:
            found.append(key)
            waiting.remove(key)
        waiting.count_lease(key is not None)
    return found


# Judging.


def test_a_constant_format_reward_does_not_hide_a_failure() -> None:
    """A known mistake: the sum of all rewards is judged, and with a reward of 0.2 for the format nobody ever fails."""
    nobody = scored((0.2, 0.0), (0.2, 0.0), (0.2, 0.0))
    assert RerollRules(column=1).judge(nobody) == Judgement("failed", 3, 0)
    assert RerollRules(column=0).judge(nobody) == Judgement("mixed", 3, 3)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 0.0], ("failed", 2, 0)),
        ([0.0, 1.0], ("mixed", 2, 1)),
        ([1.0, 1.0], ("solved", 2, 2)),
        ([0.5, 1.0], ("mixed", 2, 2)),
        ([-3.0, 0.0], ("failed", 2, 0)),
        ([NAN, 0.0], ("failed", 1, 0)),
        ([NAN, 1.0], ("solved", 1, 1)),
        ([NAN, NAN], ("unscored", 0, 0)),
    ],
)
def test_what_is_not_scored_neither_fails_nor_succeeds(rewards: list[float], expected: tuple) -> None:
    assert RerollRules().judge(scored(*[(reward,) for reward in rewards])) == Judgement(*expected)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.25, 0.125), ("failed", 2, 0)),  # at the threshold
        ((0.25, 0.5), ("mixed", 2, 1)),
        ((0.75, 0.875), ("solved", 2, 2)),  # at the threshold
        ((0.75, 0.5), ("mixed", 2, 2)),
    ],
)
def test_thresholds_belong_to_the_verdict_that_they_name(rewards: tuple[float, float], expected: tuple) -> None:
    rules = RerollRules(fail_threshold=0.25, solved_threshold=0.75)
    assert rules.judge(scored((rewards[0],), (rewards[1],))) == Judgement(*expected)


def test_a_failed_prompt_returns_later_and_so_many_times_and_no_other_does() -> None:
    rules = RerollRules(delay_versions=3, max_attempts=2)
    assert [rules.return_version((1, 5, reroll), "failed", 7) for reroll in range(4)] == [10, 10, None, None]
    assert [rules.return_version((1, 5, 0), verdict, 7) for verdict in ("solved", "mixed", "unscored")] == [None] * 3
    assert RerollRules().return_version((0, 0, 0), "failed", 0) is None, "off unless it is asked for"


def test_a_solved_prompt_rests_and_no_other_does() -> None:
    rules = RerollRules(solved_cooldown_epochs=2)
    assert rules.rests_until((3, 5, 1), "solved") == 5
    assert [rules.rests_until((3, 5, 1), verdict) for verdict in ("failed", "mixed", "unscored")] == [None] * 3
    assert RerollRules().rests_until((0, 0, 0), "solved") is None


# The queue.


def test_nothing_returns_before_its_version_and_those_that_wait_longest_go_first() -> None:
    waiting = queue()
    for key, version in (((0, 3, 1), 5), ((0, 1, 1), 4), ((0, 2, 2), 4)):
        waiting.defer(key, version)
    waiting.count_lease(False)
    assert waiting.next_due(3) is None
    assert waiting.next_due(4) == (0, 1, 1)
    assert waiting.next_due(5) == (0, 3, 1)
    assert len(waiting) == 3, "asking takes nothing away"
    assert waiting.remove((0, 3, 1)) == 5
    assert (0, 3, 1) not in waiting
    assert (0, 1, 1) in waiting


def test_a_prompt_waits_once() -> None:
    waiting = queue((0, 3, 1))
    assert waiting.defer((0, 3, 1), 9) is False
    assert waiting.defer((1, 3, 1), 9) is False
    assert waiting.state() == [[0, 3, 1, 0]]


def test_when_too_many_wait_the_longest_waiting_give_way() -> None:
    assert queue(*[(0, prompt_id, 1) for prompt_id in range(5)], max_pending=3).state() == [
        [0, 2, 1, 0], [0, 3, 1, 0], [0, 4, 1, 0],
    ]  # fmt: skip


def test_a_prompt_whose_own_turn_comes_does_not_return_as_well() -> None:
    waiting = queue((0, 3, 1), (0, 4, 1))
    assert waiting.withdraw(3)
    assert not waiting.withdraw(3)
    assert waiting.state() == [[0, 4, 1, 0]]


@pytest.mark.parametrize(("max_share", "expected"), [(0.25, 4), (0.5, 8), (0.0, 0)])
def test_of_sixteen_leases_that_share_returns(max_share: float, expected: int) -> None:
    waiting = queue(*[(0, prompt_id, 1) for prompt_id in range(20)], max_share=max_share, max_pending=99)
    assert len(taken(waiting, 0, 17)) == expected


def test_after_a_long_stretch_without_any_eight_may_follow_each_other() -> None:
    waiting = queue(*[(0, prompt_id, 1) for prompt_id in range(20)], max_share=0.125, max_pending=99, version=1)
    assert taken(waiting, 0, 1000) == []
    assert len(taken(waiting, 1, 8)) == 8
    assert taken(waiting, 1, 1) == [], (
        "eight leases gave back what one costs, and it is spent: 8 + 8/8 - 8 = 1, less it"
    )


def test_the_queue_of_a_checkpoint_is_the_queue() -> None:
    waiting = queue((0, 3, 1), (0, 1, 2), version=4)
    restored = queue((9, 9, 9))
    restored.restore(waiting.state())
    assert restored.state() == waiting.state() == [[0, 3, 1, 4], [0, 1, 2, 4]]


@given(
    max_share=st.floats(0.0, 1.0),
    max_pending=st.integers(1, 5),
    events=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=120),
)
def test_over_any_stretch_of_leases_the_share_holds(
    max_share: float, max_pending: int, events: list[tuple[int, int]]
) -> None:
    waiting = RerollQueue(max_share=max_share, max_pending=max_pending)
    leases: list[bool] = []
    for version, (prompt_id, defers) in enumerate(events):
        for other in range(defers):
            waiting.defer((0, prompt_id + other, 1), version)
        key = waiting.next_due(version)
        if key is not None:
            assert waiting.remove(key) <= version
        waiting.count_lease(key is not None)
        leases.append(key is not None)
        assert len(waiting) <= max_pending
    sums = np.concatenate([[0], np.cumsum(leases)])
    for start in range(len(leases)):
        lengths = np.arange(1, len(leases) - start + 1)
        assert (sums[start + 1 :] - sums[start] <= max_share * lengths + 8 + 1e-9).all()


# Through the buffer.


def rerolling(journal: Journal, rules: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return buffer(journal, rules=RerollRules(**({"delay_versions": 2, "max_attempts": 1} | (rules or {}))), **arguments)


def publish_until(replay: Any, version: int) -> None:
    """Trains a batch before every version, so that the budget has room."""
    for published in range(1, version + 1):
        for lease_id in [lease(replay) for _ in range(replay._cutter.budget.groups_per_step)]:
            assert offer(replay, lease_id, published - 1) == "accepted"
        cut(replay)
        replay.published(published)


def test_rerolls_really_run(journal: Journal) -> None:
    """A known mistake: failures are put aside, and the hook that brings them back is never called."""
    replay = rerolling(journal)
    failed = lease(replay)
    assert offer(replay, failed, signal=False) == "no_signal"
    assert (replay.depth()["deferred"], replay.counts["deferred"]) == (1, 1)
    publish_until(replay, 1)
    early = [lease(replay), lease(replay)]
    assert [parse_lease_id(lease_id)[0][2] for lease_id in early] == [0, 0], "two versions later, not one"
    assert [offer(replay, lease_id, 1) for lease_id in early] == ["accepted", "accepted"]
    cut(replay)
    replay.published(2)
    record = replay.lease("p", now=0.0, timeout_s=1.0)
    assert record is not None
    assert record.item.key == (0, 0, 1)
    assert (record.item.attempt, record.policy_floor, record.lease_id) == (1, 2, "0-0-1-1-s")
    assert (replay.depth()["deferred"], replay.counts["rerolls_leased"]) == (0, 1)
    assert offer(replay, record.lease_id, 2) == "accepted"
    assert offer(replay, failed, 2) == "duplicate"
    assert {n: replay.counts[n] for n in ("attempt_1_groups", "attempt_2_groups", "attempt_2_successes")} == {
        "attempt_1_groups": 5, "attempt_2_groups": 1, "attempt_2_successes": 1,
    }  # fmt: skip


def test_a_prompt_returns_so_many_times_in_an_epoch_and_then_waits_for_the_next(journal: Journal) -> None:
    replay = rerolling(journal, {"delay_versions": 0, "max_attempts": 2}, num_prompts=1000)
    asked: list[Key] = []
    for _ in range(40):
        record = replay.lease("p", now=0.0, timeout_s=1.0)
        assert record is not None
        asked.append(record.item.key)
        assert offer(replay, record.lease_id, signal=False) == "no_signal"
    assert [key for key in asked if key[1] == 0] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert max(key[2] for key in asked) == 2
    assert sum(key[2] > 0 for key in asked) == 19, "half of all, after the first that earned no return yet"


def test_a_group_that_is_trained_and_failed_returns_when_it_was_trained(journal: Journal) -> None:
    """A format reward may differ where the judging one does not."""
    replay = rerolling(journal, groups_per_step=1)
    failed = lease(replay)
    assert replay.offer([delivery(failed, rewards=(-1.0, 0.0))]) == ["accepted"]
    assert replay.depth()["deferred"] == 0
    cut(replay)
    assert replay.depth()["deferred"] == 1
    assert replay.state()["ledger"]["deferred"] == [[0, 0, 1, 2]]


def test_a_group_that_went_stale_is_asked_for_again_and_is_no_failure(journal: Journal) -> None:
    replay = rerolling(journal, groups_per_step=1)
    failed = lease(replay, timeout_s=1.0)
    replay.expire(1.0)
    publish_until(replay, 1)
    assert replay.offer([delivery(failed, rewards=(0.0, 0.0))]) == ["stale"]
    assert replay.depth()["deferred"] == 0
    assert lease(replay) == "0-0-0-2-s"


def test_counts_and_judgements_are_in_the_journal(journal: Journal) -> None:
    replay = rerolling(journal, max_staleness=2)
    first, second = lease(replay), lease(replay)
    replay.offer([delivery(first, rewards=(0.0, 0.0)), delivery(second, rewards=(0.0, NAN))])
    assert journal.query("SELECT reroll, verdict, num_scored, num_successes FROM groups ORDER BY seq") == [
        (0, "failed", 2, 0), (0, "failed", 1, 0),
    ]  # fmt: skip


def test_what_waits_and_how_it_went_is_rebuilt_from_the_checkpoint_and_the_journal(journal: Journal) -> None:
    rules = {"delay_versions": 2, "max_attempts": 1, "solved_cooldown_epochs": 1}
    replay = rerolling(journal, rules, max_staleness=9, num_prompts=20)
    ids = [lease(replay) for _ in range(6)]
    replay.offer([delivery(ids[0], rewards=(0.0, 0.0)), delivery(ids[1], rewards=(1.0, 1.0))])
    state = replay.state()
    replay.offer([delivery(ids[3], rewards=(0.0, 0.0)), delivery(ids[2], rewards=(1.0, 1.0))])
    replay.offer([delivery(ids[4], rewards=(-1.0, 0.0)), delivery(ids[5])])
    now = replay.state()
    restored = resumed(journal, state, 0, rules=RerollRules(**rules), max_staleness=9, num_prompts=20)
    again = restored.state()
    for name in ("deferred", "resting", "answered"):
        assert again["ledger"][name] == now["ledger"][name]
    assert again["ledger"]["deferred"] == [[0, 0, 1, 2], [0, 3, 1, 2]]
    assert again["ledger"]["resting"] == [[1, 1], [2, 1]]
    names = [name for name in now["counts"] if name.startswith("attempt") or name in ("deferred", "rested", "accepted")]
    assert {name: again["counts"][name] for name in names} == {name: now["counts"][name] for name in names}
    assert again["counts"]["attempt_1_groups"] == 6
    assert again["counts"]["attempt_1_successes"] == 5


def test_a_reroll_answered_before_the_crash_does_not_return_again_when_its_deferral_does(journal: Journal) -> None:
    """The failed group is trained again after the crash; what returned from it then is in the journal already."""
    rules = {"delay_versions": 0, "max_attempts": 1}
    replay = rerolling(journal, rules, groups_per_step=1, max_staleness=9)
    offer_ = delivery(lease(replay), rewards=(-1.0, 0.0))
    assert replay.offer([offer_]) == ["accepted"]
    cut(replay)  # settles it; the checkpoint was before
    reroll = next(i for i in (lease(replay) for _ in range(3)) if i == "0-0-1-1-s")
    assert replay.offer([delivery(reroll, rewards=(0.0, 0.0))]) == ["no_signal"]
    restored = resumed(journal, None, 0, version=0, rules=RerollRules(**rules), groups_per_step=1, max_staleness=9)
    assert restored.state()["ledger"]["answered"] == [[0, 0, 1]]
    assert [g.group_id for g in cut(restored).groups] == ["0-0-0-1-s"]
    assert restored.depth()["deferred"] == 0
    assert restored.state()["ledger"]["answered"] == []
    asked = [restored.lease("p", now=0.0, timeout_s=1.0) for _ in range(5)]
    assert all(record.item.reroll == 0 for record in asked if record)
