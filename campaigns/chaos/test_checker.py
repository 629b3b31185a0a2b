"""The checker, on runs small enough to be worked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from campaigns.chaos.checker import check
from campaigns.chaos.known import Answer, Batch, Evidence, Incarnation, Replay, Row, Rules, lineage


def batch(step: int, *lease_ids: str, last_step: int | None = None, again: tuple[str, ...] = ()) -> Batch:
    """Groups trained for the first time, then those that are replayed."""
    groups = tuple((lease_id, f"#{lease_id}") for lease_id in (*lease_ids, *again))
    return Batch(step, last_step or step, groups, len(lease_ids))


def incarnation(start: int, *batches: Batch, ended: int) -> Incarnation:
    return Incarnation(start, batches, frozenset(range(start + 1, ended + 1)))


MIXED, FLAT, FAILED, SOLVED = (0.0, 1.0), (0.5, 0.5), (0.0, 0.0), (1.0, 1.0)


def row(lease_id: str, step: int | None = None, **changes: Any) -> Row:
    epoch, prompt_id, reroll = map(int, lease_id.split("-")[:3])
    made = Row(1, lease_id, epoch, prompt_id, reroll, 0, "accepted", step, step, None, f"#{lease_id}", MIXED)
    return replace(made, **changes)


def accepted(*lease_ids: str) -> tuple[Answer, ...]:
    return tuple(Answer("left", lease_id, "accepted", f"#{lease_id}") for lease_id in lease_ids)


A, B, C, D, E = "0-0-0-1-x", "0-1-0-1-x", "0-2-0-1-x", "0-3-0-1-x", "0-4-0-1-x"


def evidence(**changes: Any) -> Evidence:
    """A trainer dies after step 3, of which the checkpoint holds step 1; steps 2 and 3 are cut again as they were."""
    sound = Evidence(
        answers=accepted(A, B, C, D),
        incarnations=(
            incarnation(0, batch(1, A), batch(2, B), batch(3, C), ended=3),
            incarnation(1, batch(2, B), batch(3, C), ended=3),
        ),
        rows={A: row(A, 1), B: row(B, 2), C: row(C, 3), D: row(D, policy_version=2)},
        replays=frozenset(),
        dead=frozenset(),
        final_step=3,
        rules=Rules(max_staleness=1, sync_interval=1),
        num_prompts=4,
        epoch=0,
        unsettled=frozenset(),
        deferred=frozenset(),
        checkpoint_seq=9,
    )
    return replace(sound, **changes)


def kinds(found: Evidence) -> list[str]:
    return [problem.kind for problem in check(found).problems]


def test_a_sound_run_has_no_problem() -> None:
    verdict = check(evidence())
    assert verdict.problems == []
    assert verdict.fates == {"trained": 3, "ready": 1}


def test_a_ready_group_that_every_trainer_would_have_dropped_is_forgotten() -> None:
    """Step 3 is cut at version 2, of which the batch may be one behind."""
    rows = evidence().rows
    assert kinds(evidence(rows={**rows, D: row(D, policy_version=1)})) == []
    assert kinds(evidence(rows={**rows, D: row(D, policy_version=0)})) == ["forgotten"]


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


@pytest.mark.parametrize("reason", ["stale", "quarantined", "configuration"])
def test_a_reason_in_the_journal_accounts_for_a_group(reason: str) -> None:
    verdict = check(evidence(rows={**evidence().rows, D: row(D, dropped=reason)}))
    assert verdict.problems == []
    assert verdict.fates == {"trained": 3, reason: 1}


ROWS = evidence().rows
AGAIN_0 = "0-0-0-2-y"
IN_TWO_STEPS = (incarnation(0, batch(1, A), batch(2, B), batch(3, A, C), ended=3),)
TWICE_IN_ONE = (incarnation(0, batch(1, A, A), batch(2, B), batch(3, C), ended=3),)
AFTER_ITS_CHECKPOINT = (incarnation(0, batch(1, A), ended=1), incarnation(1, batch(2, A), batch(3, C), ended=3))
TWO_GROUPS = (incarnation(0, batch(1, A), batch(2, B), batch(3, AGAIN_0), ended=3),)
OTHER_CONTENT = (*accepted(B, C, D), Answer("left", A, "accepted", "#other"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rows": {A: ROWS[A], B: ROWS[B], C: ROWS[C]}}, ["lost"]),
        ({"rows": ROWS | {D: row(D, 2)}}, ["lost", "journal"]),  # claimed, and undone for good
        ({"incarnations": IN_TWO_STEPS, "rows": ROWS | {A: row(A, 3)}}, ["trained_twice", "journal"]),
        ({"incarnations": TWICE_IN_ONE}, ["trained_twice", "trained_twice"]),
        (
            {"answers": accepted(A, C), "incarnations": AFTER_ITS_CHECKPOINT, "rows": {A: row(A, 2), C: row(C, 3)}},
            ["trained_twice", "journal"],
        ),
        ({"answers": OTHER_CONTENT}, ["content", "content"]),  # than in the journal, and in training
        ({"rows": ROWS | {C: row(C, 2)}}, ["journal"]),
        ({"rows": ROWS | {C: row(C, 3, dropped="stale")}}, ["journal"]),
        (
            {
                "answers": accepted(A, B, AGAIN_0),
                "incarnations": TWO_GROUPS,
                "rows": {A: row(A, 1), B: row(B, 2), AGAIN_0: row(AGAIN_0, 3)},
            },
            ["prompt_twice"],
        ),
    ],
)
def test_a_broken_promise_is_a_problem(changes: dict[str, object], expected: list[str]) -> None:
    assert kinds(evidence(**changes)) == expected


def test_a_step_that_nobody_trained_and_one_beyond_the_end() -> None:
    found = check(evidence(final_step=4)).problems
    assert [problem.text for problem in found] == ["step 4 was never trained"]
    assert kinds(evidence(final_step=2))[0] == "steps"


def test_a_prompt_of_a_past_epoch_without_a_fate_is_forgotten() -> None:
    verdict = check(evidence(epoch=1, num_prompts=6, dead=frozenset({(0, 4, 0)})))
    assert [problem.text for problem in verdict.problems] == ["prompt 5 of epoch 0 was neither trained nor given up"]
    settled = evidence(epoch=1, num_prompts=6, dead=frozenset({(0, 4, 0)}), unsettled=frozenset({(0, 5, 0)}))
    assert kinds(settled) == []


def test_answers_need_an_explanation() -> None:
    rows = {
        **evidence().rows,
        E: row(E, outcome="no_signal", rewards=FLAT),
        "0-5-0-1-x": row("0-5-0-1-x", outcome="stale", policy_version=1),
    }
    told = {
        "no_signal": E,  # all its rewards are equal
        "stale": "0-5-0-1-x",  # version 1, when step 3 was cut with a staleness of 1
        "duplicate": "0-0-0-2-y",  # the prompt has group A
    }
    answers = accepted(A) + tuple(Answer("left", lease_id, outcome, None) for outcome, lease_id in told.items())
    assert kinds(evidence(answers=answers, rows=rows)) == []

    assert kinds(evidence(answers=answers, rows=rows, rules=Rules(1, 2))) == ["unexplained"], "version 1 was the newest"

    wrong = {
        **rows,
        E: row(E, outcome="no_signal", rewards=MIXED),
        "0-5-0-1-x": row("0-5-0-1-x", outcome="stale", policy_version=2),
    }
    answers = (*answers[:-1], Answer("left", "0-9-0-1-x", "duplicate", None), Answer("left", A, "invalid", None))
    assert kinds(evidence(answers=answers, rows=wrong)) == ["unexplained"] * 4


# Replayed groups.

AGAIN = Rules(max_staleness=1, sync_interval=1, max_times_sampled=2, max_age_versions=2)
USES = frozenset({Replay(2, 2, 1, A), Replay(3, 3, 1, B)})


def with_replays(third: tuple[str, ...] = (B,), **changes: Any) -> Evidence:
    """A is replayed in step 2, and B in step 3; a crash in between has step 3 cut anew."""
    runs = (
        incarnation(0, batch(1, A), batch(2, B, again=(A,)), batch(3, D, again=(A,)), ended=3),
        incarnation(2, batch(3, C, again=third), ended=3),
    )
    return evidence(**({"incarnations": runs, "replays": USES, "rules": AGAIN} | changes))


def texts(found: Evidence) -> list[str]:
    return [f"{problem.kind}: {problem.text}" for problem in check(found).problems]


def test_groups_that_are_replayed_within_the_rules_are_no_problem() -> None:
    verdict = check(with_replays())
    assert verdict.problems == []
    assert (verdict.num_replays, verdict.fates) == (2, {"trained": 3, "ready": 1})


def test_a_group_that_is_replayed_too_often() -> None:
    uses = frozenset({Replay(2, 2, 1, A), Replay(3, 3, 1, A)})
    assert texts(with_replays((A,), replays=uses)) == [f"too_often: group {A} was trained and replayed 2 times"]
    assert kinds(with_replays(rules=Rules(1, 1))) == ["too_often", "too_late"] * 2, "where none may"


def test_a_group_that_is_replayed_too_late() -> None:
    (old,) = texts(with_replays((A,), replays=frozenset({Replay(2, 2, 1, A), Replay(3, 3, 1, A)}),
                                  rules=replace(AGAIN, max_times_sampled=9, max_age_versions=1)))  # fmt: skip
    assert old == f"too_late: group {A} of version 0 was replayed at 2"


def test_a_group_that_is_replayed_before_it_was_trained() -> None:
    uses = frozenset({Replay(2, 2, 1, A), Replay(3, 3, 1, D)})
    found = with_replays((D,), replays=uses)
    assert texts(found) == [f"too_early: group {D} was replayed in step 3, and was not trained before"]
    same = frozenset({Replay(2, 2, 1, A), Replay(3, 3, 1, C)})
    assert set(kinds(with_replays((C,), replays=same))) == {"too_early", "trained_twice"}


def test_a_group_that_is_replayed_without_a_record_or_in_another_place() -> None:
    assert kinds(with_replays(replays=frozenset({Replay(2, 2, 1, A)}))) == ["unrecorded"]
    moved = frozenset({Replay(2, 2, 1, A), Replay(3, 3, 0, B)})
    assert kinds(with_replays(replays=moved)) == ["unrecorded", "journal"]
    assert kinds(with_replays(replays=USES | {Replay(1, 1, 1, C)})) == ["journal"]
    assert kinds(with_replays(replays=USES | {Replay(4, 4, 1, C)})) == [], "of a step after the end"


def test_a_group_that_is_replayed_twice_in_a_step_or_with_other_content() -> None:
    uses = frozenset({*USES, Replay(3, 3, 2, B)})
    assert "trained_twice" in kinds(with_replays((B, B), replays=uses, rules=replace(AGAIN, max_times_sampled=9)))
    other = Batch(3, 3, ((C, f"#{C}"), (B, "#other")), 1)
    runs = (*with_replays().incarnations[:1], incarnation(2, other, ended=3))
    assert kinds(with_replays(incarnations=runs)) == ["content"]


def test_iterations_over_a_batch_are_one_use() -> None:
    second = batch(3, B, last_step=4, again=(A,))
    runs = (incarnation(0, batch(1, A, last_step=2), second, ended=4),)
    found = evidence(
        answers=accepted(A, B),
        incarnations=runs,
        rows={A: row(A, 1, last_step=2), B: row(B, 3, last_step=4)},
        replays=frozenset({Replay(3, 4, 1, A)}),
        rules=replace(AGAIN, max_age_versions=9),
        final_step=4,
    )
    assert texts(found) == []
    assert check(found).num_replays == 1
    cut = replace(found, incarnations=(incarnation(0, *runs[0].batches, ended=3),), final_step=3)
    assert texts(cut) == [], "the run ends between them"


# Prompts that come back.

RETURN, SECOND = "0-0-1-1-x", "0-0-2-1-x"
REROLLS = Rules(max_staleness=1, sync_interval=1, max_rerolls=1, delay_versions=2)


def with_returns(*rows: Row, **changes: Any) -> Evidence:
    return evidence(**({"rows": evidence().rows | {row.lease_id: row for row in rows}, "rules": REROLLS} | changes))


def test_a_prompt_that_failed_comes_back_once() -> None:
    failed, back = row(A, 1, rewards=FAILED), row(RETURN, policy_version=2)
    verdict = check(with_returns(failed, back))
    assert (verdict.problems, verdict.rerolls) == ([], 1)
    assert kinds(with_returns(failed)) == ["reroll"], "it never did"
    for waits in ({"deferred": frozenset({(0, 0, 1)})}, {"unsettled": frozenset({(1, 0, 0)}), "epoch": 1}):
        assert kinds(with_returns(failed, **waits)) == []
    assert kinds(with_returns(failed, checkpoint_seq=0)) == [], "the checkpoint does not know of it yet"
    assert kinds(with_returns(failed, rules=replace(REROLLS, max_rerolls=0))) == []


def test_a_prompt_that_comes_back_without_a_reason_too_early_or_too_often() -> None:
    failed, back = row(A, 1, rewards=FAILED), row(RETURN, policy_version=2)
    assert kinds(with_returns(back)) == ["reroll"], "its first group has not failed"
    assert kinds(with_returns(failed, replace(back, policy_version=1))) == ["reroll"]
    again = row(SECOND, policy_version=4)
    assert kinds(with_returns(failed, replace(back, rewards=FAILED), again)) == ["reroll"]


def test_a_prompt_that_was_solved_may_rest_for_an_epoch() -> None:
    rows = {A: row(A, 1, rewards=SOLVED)} | {f"1-{n}-0-1-x": row(f"1-{n}-0-1-x", policy_version=2) for n in (1, 2, 3)}
    missing = "prompt 0 of epoch 1 was neither trained nor given up"
    found = with_returns(*rows.values(), epoch=2)
    assert texts(found) == [f"forgotten: {missing}"]
    assert texts(replace(found, rules=replace(REROLLS, cooldown_epochs=1))) == []


def test_a_return_that_is_not_wanted_any_more_is_a_duplicate() -> None:
    answers = (*accepted(A, B, C, D), Answer("left", RETURN, "duplicate", None))
    assert kinds(evidence(answers=answers)) == []
    assert kinds(evidence(answers=(*answers[:-1], Answer("left", SECOND, "duplicate", None)))) == ["unexplained"]
