"""After a crash every accepted group is in one place, and the steps after the checkpoint are cut as they were."""

from typing import Any

import pytest

from replay.journal.recovery import Recovery, recover
from replay.journal.schema import DeadLetter, RecordedBatch
from replay.journal.writer import Journal, JournalFullError
from replay.rerolls import Grade
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import FillableJournal, claim, entry, full_disk, lease_ids


def recovered(
    journal: Journal,
    step: int,
    since_seq: int = 0,
    *,
    groups_per_step: int = 2,
    num_iterations: int = 1,
    max_staleness: int = 64,
    smaller: bool = False,
    comparable: bool = True,
) -> Recovery:
    budget = StalenessBudget(groups_per_step, max_staleness, num_iterations=num_iterations)
    return recover(journal, step, since_seq, budget, smaller=smaller, comparable=comparable)


def accept(journal: Journal, *prompt_ids: int, **changes: Any) -> None:
    journal.append([entry(prompt_id, **changes) for prompt_id in prompt_ids])


def train(journal: Journal, step: int, *prompt_ids: int, num_iterations: int = 1) -> None:
    """A batch from its first step (from 1) to the end of its last one."""
    last_step = step + num_iterations - 1
    claim(journal, step, last_step, *prompt_ids)
    for ended in range(step, last_step + 1):
        journal.end_step(ended)


def batch(step: int, *prompt_ids: int, last_step: int | None = None) -> RecordedBatch:
    return RecordedBatch(step, last_step or step, lease_ids(*prompt_ids), len(prompt_ids))


def claims(journal: Journal) -> dict[int, tuple]:
    return {
        prompt_id: rest
        for prompt_id, *rest in journal.query("SELECT prompt_id, step, last_step, dropped FROM groups ORDER BY seq")
    }


def statuses(found: Recovery) -> list[tuple[int, str]]:
    return [(prompt_id, status) for (_, prompt_id, _), status, *_ in found.prompts]


def test_an_empty_journal_says_nothing(journal: Journal) -> None:
    assert recovered(journal, 0) == Recovery()
    assert recovered(journal, 17, comparable=False) == Recovery()


def test_groups_consumed_before_the_checkpoint_are_gone_and_those_after_it_are_cut_as_they_were(
    journal: Journal,
) -> None:
    accept(journal, *range(9))
    train(journal, 1, 0, 1)
    train(journal, 2, 3, 2)  # the order within a batch is kept, too
    train(journal, 3, 4, 6)
    claim(journal, 4, 4, 5, 8)  # the trainer died in this one
    found = recovered(journal, 1, since_seq=5)
    assert found.batches == [batch(2, 3, 2), batch(3, 4, 6), batch(4, 5, 8)]
    assert list(found.ready) == lease_ids(7)
    assert statuses(found) == [(prompt_id, "held") for prompt_id in range(2, 9)]
    assert found.quarantined == 0


@pytest.mark.parametrize("step", range(5))
def test_recovery_is_the_same_when_it_is_done_again(journal: Journal, step: int) -> None:
    accept(journal, *range(9))
    for trained in range(1, 5):
        train(journal, trained, 2 * trained - 2, 2 * trained - 1)
    first = recovered(journal, step)
    assert first.batches == [batch(s, 2 * s - 2, 2 * s - 1) for s in range(step + 1, 5)]
    assert recovered(journal, step) == first


def test_steps_that_would_be_too_stale_now_are_cut_anew(journal: Journal) -> None:
    accept(journal, 0, 1, 2)
    for step, prompt_id in enumerate((0, 1, 2), start=1):  # step 3 begins with policy 2
        train(journal, step, prompt_id)
    assert recovered(journal, 0, groups_per_step=1, max_staleness=2).batches == [batch(1, 0), batch(2, 1), batch(3, 2)]
    found = recovered(journal, 0, groups_per_step=1, max_staleness=1)
    assert (found.batches, list(found.ready)) == ([batch(1, 0), batch(2, 1)], lease_ids(2))


def test_outcomes_since_the_checkpoint_are_counted(journal: Journal) -> None:
    accept(journal, 0, 1, 2)
    accept(journal, 3, outcome="no_signal")
    assert recovered(journal, 0, since_seq=1).counts == {
        "accepted": 2, "no_signal": 1, "attempt_1_groups": 3, "attempt_1_scored": 6, "attempt_1_successes": 3,
    }  # fmt: skip


# Several iterations over a batch.


def test_a_batch_begun_before_the_checkpoint_comes_first_and_whole(journal: Journal) -> None:
    accept(journal, *range(5))
    train(journal, 1, 0, 1, num_iterations=2)
    train(journal, 3, 2, 3, num_iterations=2)
    for step, expected in [
        (0, [batch(1, 0, 1, last_step=2), batch(3, 2, 3, last_step=4)]),
        (1, [batch(1, 0, 1, last_step=2), batch(3, 2, 3, last_step=4)]),
        (2, [batch(3, 2, 3, last_step=4)]),
        (3, [batch(3, 2, 3, last_step=4)]),
        (4, []),
    ]:
        assert recovered(journal, step, num_iterations=2).batches == expected


def test_a_begun_batch_that_cannot_go_on_stays_trained_as_far_as_it_was(journal: Journal) -> None:
    accept(journal, *range(5))
    train(journal, 1, 0, 1, num_iterations=2)
    claim(journal, 3, 4, 2, 3)
    found = recovered(journal, 1, num_iterations=1)
    assert (found.batches, list(found.ready)) == ([], lease_ids(2, 3, 4))
    assert claims(journal) == {0: [1, 1, None], 1: [1, 1, None]} | {i: [None, None, None] for i in (2, 3, 4)}
    assert dict(statuses(found)) == {0: "settled", 1: "settled", 2: "held", 3: "held", 4: "held"}


# Another configuration.


@pytest.mark.parametrize(("groups_per_step", "num_iterations"), [(3, 1), (1, 1), (2, 2)])
def test_batches_of_another_size_are_cut_anew_in_the_order_of_arrival(
    journal: Journal, groups_per_step: int, num_iterations: int
) -> None:
    accept(journal, 4, 1, 0, 3, 2)
    train(journal, 1, 0, 1)
    train(journal, 2, 3, 2)
    found = recovered(journal, 1, groups_per_step=groups_per_step, num_iterations=num_iterations)
    assert (found.batches, list(found.ready)) == ([], lease_ids(4, 3, 2))
    assert claims(journal) == {
        0: [1, 1, None], 1: [1, 1, None], 4: [None] * 3, 3: [None] * 3, 2: [None] * 3,
    }  # fmt: skip
    later = recovered(journal, 1)  # the size is back, the claims are not
    assert (later.batches, list(later.ready)) == ([], lease_ids(4, 3, 2))


def test_groups_that_cannot_be_used_any_more_are_dropped_and_their_prompts_go_out_again(journal: Journal) -> None:
    accept(journal, *range(5))
    accept(journal, 5, outcome="no_signal")
    train(journal, 1, 0, 1)
    train(journal, 2, 2, 3)
    found = recovered(journal, 1, comparable=False)
    assert (found.batches, list(found.ready)) == ([], [])
    assert {prompt_id: row[-1] for prompt_id, row in claims(journal).items()} == {
        0: None, 1: None, 2: "configuration", 3: "configuration", 4: "configuration", 5: None,
    }  # fmt: skip
    assert statuses(found) == [
        (0, "settled"), (1, "settled"), (2, "again"), (3, "again"), (4, "again"), (5, "settled"),
    ]  # fmt: skip


def test_a_begun_batch_that_cannot_be_used_any_more_is_not_gone_on_with(journal: Journal) -> None:
    accept(journal, *range(3))
    train(journal, 1, 0, 1, num_iterations=2)
    found = recovered(journal, 1, num_iterations=2, comparable=False)
    assert (found.batches, list(found.ready)) == ([], [])
    assert claims(journal) == {0: [1, 1, None], 1: [1, 1, None], 2: [None, None, "configuration"]}


# Groups that kill the trainer.


def test_a_batch_that_killed_the_trainer_twice_is_quarantined_and_later_ones_are_cut_anew(journal: Journal) -> None:
    accept(journal, 0, 1, 5, 2, 3, 4)
    train(journal, 1, 0, 1)
    for _ in range(2):
        assert recovered(journal, 1).quarantined == 0
        claim(journal, 2, 2, 2, 3)
    train(journal, 3, 4, 5)  # recorded in a later life of the run
    found = recovered(journal, 1)
    assert found.quarantined == 2
    assert (found.batches, list(found.ready)) == ([], lease_ids(5, 4))
    assert claims(journal)[2] == claims(journal)[3] == [2, 2, "quarantined"]
    assert dict(statuses(found)) == {0: "settled", 1: "settled", 2: "settled", 3: "settled", 4: "held", 5: "held"}


def test_one_group_of_a_batch_in_quarantine_takes_the_others_out_of_it(journal: Journal) -> None:
    accept(journal, *range(5))
    claim(journal, 1, 1, 0)
    claim(journal, 1, 1, 0, 1)
    claim(journal, 2, 2, 2, 3)
    found = recovered(journal, 0)
    assert (found.batches, list(found.ready), found.quarantined) == ([], lease_ids(1, 2, 3, 4), 1)


def test_a_step_that_ended_between_two_deaths_proves_the_groups_harmless(journal: Journal) -> None:
    accept(journal, 0, 1)
    claim(journal, 1, 1, 0, 1)  # died in step 1
    recovered(journal, 0)
    train(journal, 1, 0, 1)  # went well, but the trainer died before its checkpoint
    recovered(journal, 0)
    claim(journal, 1, 1, 0, 1)  # died in step 1
    found = recovered(journal, 0)
    assert (found.batches, found.quarantined) == ([batch(1, 0, 1)], 0)
    claim(journal, 1, 1, 0, 1)  # twice in a row
    assert recovered(journal, 0).quarantined == 2


def test_a_begun_batch_with_a_group_in_quarantine_is_not_gone_on_with(journal: Journal) -> None:
    accept(journal, *range(4))
    train(journal, 1, 0, 1, num_iterations=2)
    for _ in range(2):  # at the checkpoint of step 1, in step 2
        recovered(journal, 1, num_iterations=2)
        claim(journal, 1, 2, 0, 1)
    found = recovered(journal, 1, num_iterations=2)
    assert (found.batches, list(found.ready), found.quarantined) == ([], lease_ids(2, 3), 2)
    assert claims(journal)[0] == claims(journal)[1] == [1, 1, "quarantined"]


def test_of_what_was_dropped_before_nothing_changes(journal: Journal) -> None:
    """Its claim is of a run that did not survive, and must not look as if it had been trained in part."""
    accept(journal, *range(6))
    train(journal, 1, 0, num_iterations=2)
    for _ in range(2):
        claim(journal, 3, 4, 1)
    arguments: dict[str, Any] = {"groups_per_step": 1, "num_iterations": 2}
    assert recovered(journal, 2, **arguments).quarantined == 1
    train(journal, 3, 2, num_iterations=2)
    recovered(journal, 3, groups_per_step=2, num_iterations=2)
    assert claims(journal)[1] == [3, 4, "quarantined"]
    assert claims(journal)[2] == [3, 3, None]
    assert claims(journal)[3] == [None, None, None]


def test_quarantined_prompts_stay_settled_however_old_their_rows_are(journal: Journal) -> None:
    accept(journal, 0, 1)
    claim(journal, 1, 1, 0, 1)
    claim(journal, 1, 1, 0, 1)
    for _ in range(2):
        assert statuses(recovered(journal, 0, since_seq=2)) == [(0, "settled"), (1, "settled")]


# Prompts.


def test_what_the_checkpoint_knows_is_not_recovered(journal: Journal) -> None:
    accept(journal, 0, 1)
    accept(journal, 2, outcome="no_signal")
    accept(journal, 3, outcome="stale")
    train(journal, 1, 0, 1)
    assert recovered(journal, 1, since_seq=4).prompts == []
    assert statuses(recovered(journal, 1, since_seq=2)) == [(2, "settled"), (3, "again")]


def test_the_last_row_of_a_prompt_decides(journal: Journal) -> None:
    accept(journal, 0, outcome="stale")
    accept(journal, 0, attempt=2)
    accept(journal, 1)
    journal.drop(lease_ids(1), "stale")
    accept(journal, 1, attempt=2, outcome="no_signal")
    accept(journal, 2)
    journal.drop(lease_ids(2), "stale")
    found = recovered(journal, 0)
    assert statuses(found) == [(0, "again"), (0, "held"), (1, "again"), (1, "settled"), (2, "again")]
    assert list(found.ready) == ["0-0-0-2-s"]


def test_dead_letters_are_settled_whatever_their_groups_were(journal: Journal) -> None:
    accept(journal, 3, outcome="stale")
    journal.add_dead_letter(DeadLetter(0, 3, 0, 2, "data", "reward_failed", ""))
    journal.add_dead_letter(DeadLetter(1, 4, 1, 2, "infra", "expired", ""))
    assert recovered(journal, 0).prompts == [
        ((0, 3, 0), "again", "mixed", 0, True),
        ((0, 3, 0), "settled", "unscored", 0, True),
        ((1, 4, 1), "settled", "unscored", 0, True),
    ]


# Returns and replays.


def test_recovered_prompts_carry_what_brings_a_prompt_back(journal: Journal) -> None:
    failed = Grade("failed", 2, 0)
    accept(journal, 0, outcome="no_signal", grade=failed, policy_version=3)
    accept(journal, 0, reroll=1, outcome="no_signal", grade=Grade("solved", 2, 2), policy_version=7)
    accept(journal, 1, grade=failed)
    found = recovered(journal, 0, since_seq=1)
    assert found.prompts == [
        ((0, 0, 1), "settled", "solved", 7, True),
        ((0, 1, 0), "held", "failed", 0, True),
    ]
    assert found.counts == {
        "no_signal": 1, "accepted": 1, "attempt_1_groups": 1, "attempt_1_scored": 2, "attempt_1_successes": 0,
        "attempt_2_groups": 1, "attempt_2_scored": 2, "attempt_2_successes": 2,
    }  # fmt: skip


def test_a_batch_with_replays_is_cut_again_as_it_was(journal: Journal) -> None:
    accept(journal, *range(4))
    train(journal, 1, 0, 1)
    claim(journal, 2, 2, 2, again=(1,))
    found = recovered(journal, 1)
    assert found.batches == [RecordedBatch(2, 2, lease_ids(2, 1), 1)]
    assert (list(found.ready), found.not_replayable) == (lease_ids(3), set())


def test_a_replayed_group_is_not_taken_for_stale(journal: Journal) -> None:
    """Its age has a bound of its own, in the replay table."""
    accept(journal, 0, 1)
    accept(journal, 2, policy_version=1)
    train(journal, 1, 0, 1)
    claim(journal, 2, 2, 2, again=(0,))
    assert recovered(journal, 1, max_staleness=0).batches == [RecordedBatch(2, 2, lease_ids(2, 0), 1)]


def test_a_begun_batch_that_cannot_go_on_leaves_the_uses_that_the_checkpoint_knows(journal: Journal) -> None:
    accept(journal, *range(4))
    train(journal, 1, 0, 1, num_iterations=2)
    claim(journal, 3, 4, 2, again=(0,))
    claim(journal, 5, 6, 3, again=(1,))
    recovered(journal, 3, num_iterations=1)
    assert journal.query("SELECT step, last_step, lease_id FROM replays") == [(3, 3, lease_ids(0)[0])]


@pytest.mark.parametrize("smaller", [False, True])
def test_smaller_batches_stand_only_where_they_may_be(journal: Journal, smaller: bool) -> None:
    accept(journal, 0, 1, 2)
    train(journal, 1, 0)
    found = recovered(journal, 0, smaller=smaller)
    assert found.batches == ([batch(1, 0)] if smaller else [])
    assert recovered(journal, 0, groups_per_step=1, smaller=smaller).batches == ([batch(1, 0)] if smaller else [])


def test_a_crash_in_the_middle_of_recovery_changes_nothing(journal: FillableJournal) -> None:
    """Else what the first half put into quarantine would look, to the next start, like an old matter."""
    accept(journal, *range(4))
    claim(journal, 1, 1, 0, 1)
    claim(journal, 1, 1, 0, 1)
    before = claims(journal)
    with full_disk(journal), pytest.raises(JournalFullError):
        recovered(journal, 0)
    assert claims(journal) == before
    assert recovered(journal, 0).quarantined == 2
