"""The checker, on runs small enough to be worked by hand."""

from dataclasses import replace

import pytest

from tests.chaos.checker import Answer, Batch, Evidence, Incarnation, Row, check, lineage


def batch(step: int, *group_ids: str, last_step: int | None = None) -> Batch:
    return Batch(step, last_step or step, tuple((group_id, f"#{group_id}") for group_id in group_ids))


def incarnation(start: int, *batches: Batch, ended: int) -> Incarnation:
    return Incarnation(start, batches, frozenset(range(start + 1, ended + 1)))


def row(group_id: str, step: int | None = None, **changes: object) -> Row:
    epoch, prompt_id, _, _ = group_id.split("-")
    made = Row(group_id, int(epoch), int(prompt_id), 0, "accepted", step, step, None, f"#{group_id}", True)
    return replace(made, **changes)


def accepted(*group_ids: str) -> tuple[Answer, ...]:
    return tuple(Answer("left", group_id, "accepted", f"#{group_id}") for group_id in group_ids)


A, B, C, D, E = "0-0-0-1-x", "0-1-0-1-x", "0-2-0-1-x", "0-3-0-1-x", "0-4-0-1-x"


def evidence(**changes: object) -> Evidence:
    """A trainer dies after step 3, of which the checkpoint holds step 1; steps 2 and 3 are cut again as they were."""
    sound = Evidence(
        answers=accepted(A, B, C, D),
        incarnations=(
            incarnation(0, batch(1, A), batch(2, B), batch(3, C), ended=3),
            incarnation(1, batch(2, B), batch(3, C), ended=3),
        ),
        rows={A: row(A, 1), B: row(B, 2), C: row(C, 3), D: row(D)},
        dead=frozenset(),
        final_step=3,
        max_staleness=1,
        sync_interval=1,
        num_prompts=4,
        epoch=0,
        unsettled=frozenset(),
    )
    return replace(sound, **changes)


def kinds(found: Evidence) -> list[str]:
    return [problem.kind for problem in check(found).problems]


def test_a_sound_run_has_no_problem() -> None:
    verdict = check(evidence())
    assert verdict.problems == []
    assert verdict.fates == {"trained": 3, "ready": 1}


def test_the_lineage_keeps_what_the_checkpoint_held_and_what_came_after() -> None:
    runs = [
        incarnation(0, batch(1, A), batch(2, B), batch(3, C), ended=2),
        incarnation(1, batch(2, B), ended=1),
        incarnation(1, batch(2, C), batch(3, D), ended=3),
    ]
    assert {step: [group for group, _ in batch.groups] for step, batch in lineage(runs).items()} == {
        1: [A],
        2: [C],
        3: [D],
    }
    assert set(lineage(runs[:2])) == {1}, "step 2 was undone, and begun again without ending"


def test_a_batch_of_several_iterations_is_one_training() -> None:
    twice = batch(1, A, last_step=2)
    runs = (incarnation(0, twice, batch(3, B), ended=1), incarnation(1, twice, batch(3, B), ended=3))
    found = evidence(
        answers=accepted(A, B), incarnations=runs, rows={A: row(A, 1, last_step=2), B: row(B, 3, last_step=3)}
    )
    assert kinds(found) == []


def test_an_accepted_group_that_the_journal_does_not_know_is_lost() -> None:
    rows = evidence().rows
    assert kinds(evidence(rows={k: v for k, v in rows.items() if k != D})) == ["lost"]


def test_an_accepted_group_that_was_claimed_and_undone_for_good_is_lost() -> None:
    assert kinds(evidence(rows={**evidence().rows, D: row(D, 2)})) == ["lost", "journal"]


@pytest.mark.parametrize("reason", ["stale", "quarantined", "configuration"])
def test_a_reason_in_the_journal_accounts_for_a_group(reason: str) -> None:
    verdict = check(evidence(rows={**evidence().rows, D: row(D, dropped=reason)}))
    assert verdict.problems == []
    assert verdict.fates == {"trained": 3, reason: 1}


def test_a_group_in_two_steps_is_trained_twice() -> None:
    runs = (incarnation(0, batch(1, A), batch(2, B), batch(3, A, C), ended=3),)
    found = evidence(incarnations=runs, rows={**evidence().rows, A: row(A, 3)})
    assert kinds(found) == ["trained_twice", "journal"], "and the journal can name only one of the steps"


def test_a_group_twice_in_one_step_is_trained_twice() -> None:
    runs = (incarnation(0, batch(1, A, A), batch(2, B), batch(3, C), ended=3),)
    assert set(kinds(evidence(incarnations=runs))) == {"trained_twice"}


def test_a_step_trained_again_after_it_was_in_the_checkpoint_is_not_undone() -> None:
    runs = (
        incarnation(0, batch(1, A), ended=1),
        incarnation(1, batch(2, A), batch(3, C), ended=3),
    )
    found = evidence(answers=accepted(A, C), incarnations=runs, rows={A: row(A, 2), C: row(C, 3)})
    assert kinds(found) == ["trained_twice", "journal"]


def test_other_content_than_acknowledged_is_noticed_in_both_places() -> None:
    answers = (*accepted(B, C, D), Answer("left", A, "accepted", "#other"))
    assert kinds(evidence(answers=answers)) == ["content", "content"]


def test_the_journal_must_name_the_step_that_trained_a_group() -> None:
    assert kinds(evidence(rows={**evidence().rows, C: row(C, 2)})) == ["journal"]
    assert kinds(evidence(rows={**evidence().rows, C: row(C, 3, dropped="stale")})) == ["journal"]


def test_a_step_that_nobody_trained_and_one_beyond_the_end() -> None:
    found = check(evidence(final_step=4)).problems
    assert [problem.text for problem in found] == ["step 4 was never trained"]
    assert kinds(evidence(final_step=2))[0] == "steps"


def test_one_prompt_trained_as_two_groups() -> None:
    again = "0-0-0-2-y"
    runs = (incarnation(0, batch(1, A), batch(2, B), batch(3, again), ended=3),)
    rows = {A: row(A, 1), B: row(B, 2), again: row(again, 3)}
    assert kinds(evidence(answers=accepted(A, B, again), incarnations=runs, rows=rows)) == ["prompt_twice"]


def test_a_prompt_of_a_past_epoch_without_a_fate_is_forgotten() -> None:
    verdict = check(evidence(epoch=1, num_prompts=6, dead=frozenset({(0, 4)})))
    assert [problem.text for problem in verdict.problems] == ["prompt 5 of epoch 0 was neither trained nor given up"]
    settled = evidence(epoch=1, num_prompts=6, dead=frozenset({(0, 4)}), unsettled=frozenset({(0, 5)}))
    assert kinds(settled) == []


def test_answers_need_an_explanation() -> None:
    rows = {
        **evidence().rows,
        E: row(E, outcome="no_signal", has_signal=False),
        "0-5-0-1-x": row("0-5-0-1-x", outcome="stale", policy_version=1),
    }
    told = {
        "no_signal": E,  # all its rewards are equal
        "stale": "0-5-0-1-x",  # version 1, when step 3 was cut with a staleness of 1
        "duplicate": "0-0-0-2-y",  # the prompt has group A
    }
    answers = accepted(A) + tuple(Answer("left", lease_id, outcome, None) for outcome, lease_id in told.items())
    assert kinds(evidence(answers=answers, rows=rows)) == []

    assert kinds(evidence(answers=answers, rows=rows, sync_interval=2)) == ["unexplained"], "version 1 was the newest"

    wrong = {
        **rows,
        E: row(E, outcome="no_signal", has_signal=True),
        "0-5-0-1-x": row("0-5-0-1-x", outcome="stale", policy_version=2),
    }
    answers = (*answers[:-1], Answer("left", "0-9-0-1-x", "duplicate", None), Answer("left", A, "invalid", None))
    assert kinds(evidence(answers=answers, rows=wrong)) == ["unexplained"] * 4
