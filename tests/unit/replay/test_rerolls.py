"""Who returns after a failure and who sits out after a success; when, in which order, and how often."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.groups import GroupShape, RolloutGroup
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId
from replay.rerolls import Grade, RerollRules, RerollShare
from tests.unit.replay.builders import buffer, cut, delivery, group_message, lease, offer, reroll_rules, resumed

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


# Judging.


def test_a_constant_format_reward_does_not_hide_a_failure() -> None:
    """A known mistake: the sum of all rewards is judged, and with a reward of 0.2 for the format nobody ever fails."""
    nobody = scored((0.2, 0.0), (0.2, 0.0), (0.2, 0.0))
    assert reroll_rules(column=1).grade(nobody) == Grade("failed", 3, 0)
    assert reroll_rules(column=0).grade(nobody) == Grade("mixed", 3, 3)


def test_a_row_of_another_environment_is_judged_by_the_first_reward_that_it_has() -> None:
    rules = RerollRules(reroll_rules().settings, 1, (0, 1, 2))
    assert rules.grade(scored((NAN, NAN, 1.0), (NAN, NAN, 1.0))) == Grade("solved", 2, 2)
    assert rules.grade(scored((1.0, 0.0, NAN), (1.0, 0.0, NAN))) == Grade("failed", 2, 0)
    assert rules.grade(scored((NAN, NAN, NAN))) == Grade("unscored", 0, 0)


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
    assert reroll_rules().grade(scored(*[(reward,) for reward in rewards])) == Grade(*expected)


def test_without_reward_functions_no_group_has_a_verdict() -> None:
    assert reroll_rules().grade(scored((), ())) == Grade("unscored", 0, 0)


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
    rules = reroll_rules(fail_threshold=0.25, solved_threshold=0.75)
    assert rules.grade(scored((rewards[0],), (rewards[1],))) == Grade(*expected)


def test_a_failed_prompt_returns_later_and_so_many_times_and_no_other_does() -> None:
    rules = reroll_rules(delay_versions=3, max_attempts=2)
    assert [rules.return_version(Key(1, 5, reroll), "failed", 7) for reroll in range(4)] == [10, 10, None, None]
    assert [rules.return_version(Key(1, 5, 0), verdict, 7) for verdict in ("solved", "mixed", "unscored")] == [None] * 3
    assert reroll_rules().return_version(Key(0, 0, 0), "failed", 0) is None, "off unless it is asked for"


def test_a_solved_prompt_is_in_cooldown_and_no_other_does() -> None:
    rules = reroll_rules(solved_cooldown_epochs=2)
    assert rules.cooldown_until(Key(3, 5, 1), "solved") == 5
    assert [rules.cooldown_until(Key(3, 5, 1), verdict) for verdict in ("failed", "mixed", "unscored")] == [None] * 3
    assert reroll_rules().cooldown_until(Key(0, 0, 0), "solved") is None


# The share.


def rerolls(max_share: float, wanted: list[bool]) -> list[bool]:
    """Which of so many leases are rerolls, if one is wanted at these."""
    share = RerollShare(max_share)
    leases = []
    for is_wanted in wanted:
        leases.append(is_wanted and share.allows_one)
        share.count_lease(leases[-1])
    return leases


@pytest.mark.parametrize(("max_share", "expected"), [(0.25, 4), (0.5, 8), (0.0, 0)])
def test_of_sixteen_leases_that_share_are_rerolls(max_share: float, expected: int) -> None:
    assert sum(rerolls(max_share, [True] * 17)) == expected


def test_after_a_long_stretch_without_any_eight_may_follow_each_other() -> None:
    """Eight leases gave back what one reroll costs, and it is spent: 8 + 8/8 - 8 = 1, less it."""
    assert rerolls(0.125, [False] * 1000 + [True] * 9)[1000:] == [True] * 8 + [False]


@given(max_share=st.floats(0.0, 1.0), wanted=st.lists(st.booleans(), max_size=120))
def test_over_any_stretch_of_leases_the_share_holds(max_share: float, wanted: list[bool]) -> None:
    leases = rerolls(max_share, wanted)
    sums = np.concatenate([[0], np.cumsum(leases)])
    for start in range(len(leases)):
        lengths = np.arange(1, len(leases) - start + 1)
        assert (sums[start + 1 :] - sums[start] <= max_share * lengths + 8 + 1e-9).all()


# Through the buffer.


def rerolling(journal: Journal, rules: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return buffer(
        journal, rules=reroll_rules(**({"delay_versions": 2, "max_attempts": 1} | (rules or {}))), **arguments
    )


def publish_until(replay: Any, version: int) -> None:
    """Trains a batch before every version, so that the budget has room."""
    for published in range(1, version + 1):
        for lease_id in [lease(replay) for _ in range(replay.selector.budget.groups_per_step)]:
            assert offer(replay, lease_id, published - 1) == "accepted"
        cut(replay)
        replay.published(published)


def test_rerolls_really_run(journal: Journal) -> None:
    """A known mistake: failures are put aside, and the hook that brings them back is never called."""
    replay = rerolling(journal)
    failed = lease(replay)
    assert offer(replay, failed, signal=False) == "no_signal"
    assert (replay.depth()["deferred"], replay.totals["deferred"]) == (1, 1)
    publish_until(replay, 1)
    early = [lease(replay), lease(replay)]
    assert [LeaseId.parse(lease_id).key.reroll for lease_id in early] == [0, 0], "two versions later, not one"
    assert [offer(replay, lease_id, 1) for lease_id in early] == ["accepted", "accepted"]
    cut(replay)
    replay.published(2)
    record = replay.lease("p", now=0.0, timeout_s=1.0)
    assert record is not None
    assert record.task.key == (0, 0, 1)
    assert (record.task.attempt, record.policy_floor, record.lease_id) == (1, 2, "0-0-1-1-s")
    assert (replay.depth()["deferred"], replay.totals["rerolls_leased"]) == (0, 1)
    assert offer(replay, record.lease_id, 2) == "accepted"
    assert offer(replay, failed, 2) == "duplicate"
    assert {n: replay.totals[n] for n in ("attempt_1_groups", "attempt_2_groups", "attempt_2_successes")} == {
        "attempt_1_groups": 5, "attempt_2_groups": 1, "attempt_2_successes": 1,
    }  # fmt: skip


def test_a_group_that_is_trained_and_failed_returns_when_it_was_trained(journal: Journal) -> None:
    """A format reward may differ where the judging one does not."""
    replay = rerolling(journal, groups_per_step=1)
    failed = lease(replay)
    assert replay.offer([delivery(failed, rewards=(-1.0, 0.0))]) == ["accepted"]
    assert replay.depth()["deferred"] == 0
    cut(replay)
    assert replay.depth()["deferred"] == 1
    assert replay.state()["ledger"]["deferred"] == [[0, 0, 1, 2]]


def test_what_waits_and_how_it_went_is_rebuilt_from_the_checkpoint_and_the_journal(journal: Journal) -> None:
    rules = {"delay_versions": 2, "max_attempts": 1, "solved_cooldown_epochs": 1}
    replay = rerolling(journal, rules, max_staleness=9, num_prompts=20)
    ids = [lease(replay) for _ in range(6)]
    replay.offer([delivery(ids[0], rewards=(0.0, 0.0)), delivery(ids[1], rewards=(1.0, 1.0))])
    state = replay.state()
    replay.offer([delivery(ids[3], rewards=(0.0, 0.0)), delivery(ids[2], rewards=(1.0, 1.0))])
    replay.offer([delivery(ids[4], rewards=(-1.0, 0.0)), delivery(ids[5])])
    now = replay.state()
    restored = resumed(journal, state, 0, rules=reroll_rules(**rules), max_staleness=9, num_prompts=20)
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
    restored = resumed(journal, None, 0, version=0, rules=reroll_rules(**rules), groups_per_step=1, max_staleness=9)
    assert restored.state()["ledger"]["answered"] == [[0, 0, 1]]
    assert [g.lease_id for g in cut(restored).groups] == ["0-0-0-1-s"]
    assert restored.depth()["deferred"] == 0
    assert restored.state()["ledger"]["answered"] == []
    asked = [restored.lease("p", now=0.0, timeout_s=1.0) for _ in range(5)]
    assert all(record.task.key.reroll == 0 for record in asked if record)
