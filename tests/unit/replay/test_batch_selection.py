"""Batches are cut by their rule; first trainings first, and replays within their bounds."""

from typing import Any

import pytest

from replay.batch_rule import BatchRule
from replay.batch_selection import BatchSelector
from replay.journal.schema import RecordedBatch
from replay.journal.writer import Journal, JournalFullError
from replay.replay_table import ReplayTable
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import (
    FillableJournal,
    buffer,
    cut,
    delivery,
    entry,
    fill,
    full_disk,
    group,
    lease,
    names,
    replay_table,
    resumed,
    spread,
)

PLENTY = 10**6


def table(**settings: Any) -> ReplayTable:
    """Those that came first are replayed first, once."""
    return replay_table(**({"max_size": 8, "max_times_sampled": 2, "max_age_versions": 4} | settings))


def selector(journal: Journal, *, groups_per_step: int = 4, sampled: bool = False, **arguments: Any) -> BatchSelector:
    rule = (BatchRule.sampled if sampled else BatchRule.full)(groups_per_step)
    return BatchSelector(StalenessBudget(groups_per_step, 9), journal, rule, signal=spread, **arguments)


def insert(selection: BatchSelector, journal: Journal, *prompt_ids: int, version: int = 0) -> list[str]:
    rows = [entry(prompt_id, policy_version=version) for prompt_id in prompt_ids]
    journal.append(rows)
    for number, row in enumerate(rows, start=selection.last_answer + selection.num_ready + 1):
        selection.insert(group(row.lease_id, version), number)
    return [row.lease_id for row in rows]


def test_a_batch_is_full_or_nothing(journal: Journal) -> None:
    selection = selector(journal)
    first = insert(selection, journal, 0, 1, 2)
    assert selection.take(num_answers=3, num_trained=0) is None
    first += insert(selection, journal, 3, 4)
    batch = selection.take(num_answers=5, num_trained=0)
    assert batch is not None
    assert (names(batch.groups), batch.num_fresh, batch.first_step, batch.last_step) == (first[:4], 4, 1, 1)
    assert (selection.num_ready, selection.next_step, selection.num_replayable) == (1, 1, 0)


def test_at_least_one_group_of_a_batch_is_trained_for_the_first_time(journal: Journal) -> None:
    with pytest.raises(ValueError, match="at least one group that is trained for the first time"):
        selector(journal, max_replayed=4)
    selection = selector(journal, groups_per_step=2, replay=table(), max_replayed=1)
    insert(selection, journal, 0, 1)
    assert selection.take(num_answers=PLENTY, num_trained=0)
    assert selection.num_replayable == 2
    assert selection.take(num_answers=PLENTY, num_trained=0) is None


@pytest.mark.parametrize(
    ("max_replayed", "num_generated", "num_fresh", "expected"),
    [
        (2, PLENTY, 2, [0, 1]),
        (2, PLENTY, 3, [0]),
        (2, PLENTY, 1, None),  # two may be replayed, and three are missing
        (3, PLENTY, 1, [0, 1, 2]),
        (1, PLENTY, 2, None),
        (3, 8, 2, [0, 1]),  # 4 trained, 2 in the batch: two more make eight
        (3, 7, 2, None),
        (3, 7, 3, None),
        (3, 8, 3, [0]),
        (0, PLENTY, 3, None),
    ],
)
def test_replays_fill_a_batch_as_far_as_share_and_limiter_allow(
    journal: Journal, max_replayed: int, num_generated: int, num_fresh: int, expected: list[int] | None
) -> None:
    selection = selector(journal, replay=table(), max_replayed=max_replayed)
    trained = insert(selection, journal, 0, 1, 2, 3)
    assert selection.take(num_answers=4, num_trained=0)
    fresh = insert(selection, journal, *range(10, 10 + num_fresh), version=1)
    batch = selection.take(num_answers=num_generated, num_trained=4)
    if expected is None:
        assert batch is None
        return
    assert batch is not None
    assert names(batch.groups) == fresh + [trained[index] for index in expected]
    assert batch.num_fresh == num_fresh
    assert journal.query("SELECT step, position, last_step, lease_id, tries FROM replays ORDER BY position") == [
        (2, num_fresh + place, 2, trained[index], 1) for place, index in enumerate(expected)
    ]


def test_places_of_groups_without_signal_are_kept_for_one_batch_at_most(journal: Journal) -> None:
    """More would let steps run ahead of the groups that are still under way, which would come back stale."""
    selection = selector(journal, replay=table(max_times_sampled=9), max_replayed=3)
    insert(selection, journal, 0, 1, 2, 3)
    assert selection.take(num_answers=104, num_trained=0), "100 had no signal"
    insert(selection, journal, 4)
    second = selection.take(num_answers=105, num_trained=4)
    assert second is not None
    assert second.num_fresh == 1
    insert(selection, journal, 5)
    assert selection.take(num_answers=106, num_trained=8) is None, "one of the four places is left"


def test_a_group_is_replayed_until_it_is_used_up_or_too_old(journal: Journal) -> None:
    replay = table(max_times_sampled=3, max_age_versions=2)
    selection = selector(journal, groups_per_step=2, replay=replay, max_replayed=1)
    first = insert(selection, journal, 0, 1)
    batches = [selection.take(num_answers=PLENTY, num_trained=0)]
    for step in range(1, 6):
        insert(selection, journal, 10 * step, version=step)
        batches.append(selection.take(num_answers=PLENTY, num_trained=0))
    replayed = [names(batch.groups)[batch.num_fresh :] for batch in batches if batch is not None]
    third = [entry(10 * step).lease_id for step in range(6)]
    assert replayed == [[], [first[0]], [first[0]], [third[1]], [third[2]], [third[3]]]


def test_the_journal_knows_a_batch_before_anybody_sees_it(journal: FillableJournal) -> None:
    selection = selector(journal, groups_per_step=2, replay=table(), max_replayed=1)
    insert(selection, journal, 0, 1)
    assert selection.take(num_answers=2, num_trained=0)
    insert(selection, journal, 2, version=1)
    before = selection.state(), selection.num_ready, selection.next_step
    with full_disk(journal), pytest.raises(JournalFullError):
        selection.take(num_answers=PLENTY, num_trained=2)
    assert (selection.state(), selection.num_ready, selection.next_step) == before
    assert journal.query("SELECT * FROM replays") == []
    assert selection.take(num_answers=PLENTY, num_trained=2)


# Through the buffer.


def with_replays(journal: Journal, **arguments: Any) -> tuple[Any, Any, list[list[str]]]:
    """A checkpoint after step 1, and two more steps: [2, 3 | 0 1] and [4, 5 | 0 1]."""
    values = {"groups_per_step": 4, "max_staleness": 9, "max_replayed": 2} | arguments
    replay = buffer(journal, replay=table(max_times_sampled=3, samples_per_insert=9.0), **values)
    batches = []
    state = None
    for step in range(3):
        fill(replay, 0, count=4 if step == 0 else 2)
        batches.append(names(cut(replay).groups))
        journal.end_step(step + 1)
        replay.published(step + 1)
        if step == 0:
            state = replay.state()
    return replay, state, batches


def test_batches_with_replays_are_cut_again_as_they_were(journal: Journal) -> None:
    replay, state, batches = with_replays(journal)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert batches[1][2:] == batches[2][2:] == batches[0][:2]
    fill(replay, 3, count=3)  # more to choose from, which must not matter
    restored = resumed(journal, state, 1, replay=table(max_times_sampled=3, samples_per_insert=9.0), groups_per_step=4,
                       max_staleness=9, max_replayed=2)  # fmt: skip
    again = [cut(restored) for _ in range(2)]
    assert [names(batch.groups) for batch in again] == batches[1:]
    assert [batch.num_fresh for batch in again] == [2, 2]
    assert restored.totals["replayed"] == 4
    assert restored.state()["replay"] == replay.state()["replay"]
    assert journal.query("SELECT step, position, tries FROM replays ORDER BY step, position") == [
        (2, 2, 1), (2, 3, 1), (3, 2, 1), (3, 3, 1),
    ]  # fmt: skip


def test_replays_of_a_batch_that_killed_the_trainer_twice_are_replayed_no_more(journal: Journal) -> None:
    _, state, batches = with_replays(journal)
    arguments: dict[str, Any] = {"groups_per_step": 4, "max_staleness": 9, "max_replayed": 2}
    for session in "tu":
        replay = resumed(journal, state, 1, session=session, replay=table(max_times_sampled=3), **arguments)
        assert names(cut(replay).groups) == batches[1]
    last = resumed(journal, state, 1, session="v", replay=table(max_times_sampled=3), **arguments)
    assert last.totals["quarantined"] == 2
    assert [row[0] for row in last.state()["replay"]] == batches[0][2:]
    assert journal.query("SELECT lease_id FROM groups WHERE NOT replayable ORDER BY seq") == [
        (lease_id,) for lease_id in batches[0][:2]
    ]
    assert journal.query("SELECT count(*) FROM replays") == [(0,)]
    assert last.depth()["ready"] == 2, "the groups of the step after it"


def test_a_group_that_killed_the_trainer_in_a_later_iteration_is_not_replayed(journal: Journal) -> None:
    """It is in the table of the checkpoint, because its first iteration went well."""
    arguments: dict[str, Any] = {"num_iterations": 2, "max_staleness": 9, "max_replayed": 1}
    replay = buffer(journal, replay=table(), **arguments)
    fill(replay, 0)
    cut(replay)
    journal.end_step(1)
    state = replay.state()
    replay = resumed(journal, state, 1, replay=table(), **arguments)
    assert len(replay.state()["replay"]) == 2
    cut(replay)
    last = resumed(journal, state, 1, session="u", replay=table(), **arguments)
    assert last.totals["quarantined"] == 2
    assert last.state()["replay"] == []


def test_iterations_that_the_checkpoint_has_are_not_taken_again(journal: Journal) -> None:
    arguments: dict[str, Any] = {"num_iterations": 3, "max_staleness": 9}
    replay = buffer(journal, **arguments)
    fill(replay, 0)
    cut(replay)
    for step in (1, 2):
        journal.end_step(step)
    batch = cut(resumed(journal, replay.state(), 2, **arguments))
    assert (batch.first_step, batch.num_iterations, batch.last_step) == (1, 1, 3)


def test_what_is_left_of_a_batch_after_a_quarantine_is_not_taken_for_the_batch(journal: Journal) -> None:
    replay = buffer(journal, groups_per_step=3, max_staleness=9, sampled=True)
    (harmless,) = fill(replay, 0, count=1)
    (killer,) = fill(replay, 0, count=1)
    journal.claim(RecordedBatch(1, 1, [harmless, killer], 2))
    journal.query("UPDATE groups SET tries = 2 WHERE lease_id = ?", (killer,))
    restored = resumed(journal, None, 0, groups_per_step=3, max_staleness=9, sampled=True)
    assert journal.query("SELECT step, dropped FROM groups ORDER BY seq") == [(None, None), (1, "quarantined")]
    assert restored.depth()["ready"] == 1
    assert restored.offer([delivery(lease(restored))]) == ["accepted"]
    assert len(cut(restored).groups) == 2


def test_a_group_that_grows_stale_while_batches_are_cut_again_is_dropped_at_once(journal: Journal) -> None:
    """It arrived from a policy that the crash had made the newest again."""
    arguments: dict[str, int] = {"groups_per_step": 1, "max_staleness": 1}
    replay = buffer(journal, **arguments)
    for step in range(3):
        fill(replay, step, count=1)
        cut(replay)
        journal.end_step(step + 1)
        replay.published(step + 1)
    restored = resumed(journal, None, 0, **arguments)
    assert restored.offer([delivery("0-3-0-1-s", 0)]) == ["accepted"]
    steps = [cut(restored).first_step for _ in range(3)]
    assert (steps, restored.totals["went_stale"], restored.depth()["ready"]) == ([1, 2, 3], 1, 0)
    assert restored.state()["ledger"]["unsettled"] == [[0, 3, 0, 0, 0, 0, 0]]
