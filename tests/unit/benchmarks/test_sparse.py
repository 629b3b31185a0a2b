"""What `make bench-sparse` counts and how it compares."""

import pytest

from benchmarks.sparse_attempts import by_reroll
from benchmarks.sparse_base import needs_carry
from benchmarks.sparse_report import tables, tokens_to
from benchmarks.sparse_run import Case, Plan

PLAN = Plan("base", budget_tokens=1000, evaluations=10)


def a_run(arm: str, curve: list[tuple[int, int, float, float]]) -> dict[str, object]:
    counts = {"accepted": 40, "no_signal": 60, "trained": 40, "replayed": 20}
    attempts = {
        str(number): {
            "groups": 10, "scored": 80, "successes": 8, "solved_groups": 4, "fresh_now": 4.0, "fresh_before": 2.0,
        }
        for number in (0, 1)
    }  # fmt: skip
    case = {"arm": arm, "groups_per_step": 4, "learning_rate": 0.001, "effective_sample_share": 0.9}
    return case | {"curve": curve, "steps": 5, "counts": counts, "attempts": attempts}


@pytest.mark.parametrize(("prompt", "carries"), [("37+45=", True), ("31+45=", False), ("15+85=", True)])
def test_a_carry_is_needed_when_the_ones_reach_ten(prompt: str, carries: bool) -> None:
    assert needs_carry(prompt) is carries


def test_rerolls_are_compared_with_fresh_prompts_of_their_versions() -> None:
    rows = [  # epoch, prompt, reroll, version, scored, successes
        (0, 7, 0, 0, 8, 0),
        (0, 8, 0, 0, 8, 2),
        (0, 9, 0, 10, 8, 6),
        (0, 7, 1, 10, 8, 3),
    ]
    attempts = by_reroll(rows)
    assert attempts.keys() == {0, 1}
    reroll = attempts[1]
    assert (reroll.groups, reroll.scored, reroll.successes, reroll.solved_groups) == (1, 8, 3, 1)
    assert reroll.fresh_now == pytest.approx(6.0)
    assert reroll.fresh_before == pytest.approx(1.0)


def test_tokens_to_an_accuracy_are_interpolated() -> None:
    run = a_run("plain", [(0, 0, 0.0, 0.0), (100, 1, 0.0, 0.4), (200, 2, 0.0, 0.6), (300, 3, 0.0, 0.1)])
    assert tokens_to(run, 0.5) == pytest.approx(150.0)
    assert tokens_to(run, 0.8) is None


def test_a_run_that_never_gets_there_counts_with_its_budget_and_says_so() -> None:
    slow = a_run("plain", [(0, 0, 0.0, 0.0), (500, 1, 0.0, 0.5), (1000, 2, 0.0, 0.7)])
    fast = a_run("all", [(0, 0, 0.0, 0.0), (250, 1, 0.0, 0.5), (500, 2, 0.0, 0.8)])
    text = tables(PLAN, [slow, fast])
    assert "| plain | 4 | 0.001 | 500 (500 to 500) | 1.00 | >1,000 (1,000 to >1,000) | 1.00 |" in text
    assert "| all | 4 | 0.001 | 250 (250 to 250) | 2.00 | 500 (500 to 500) | 2.00 |" in text
    assert "| all, 4, 0.001 | reroll 1 | 10 | 0.100 | 0.400 | 0.050 | 0.025 |" in text


def test_a_file_name_says_all_that_differs_between_runs() -> None:
    case = Case("all", 3, 8, 1e-3, ("replay.max_share=0.5",))
    assert case.name == "all-replay.max_share_0.5-groups8-lr0.001-seed3"
    assert {"trainer.learning_rate=0.001", "pipeline.groups_per_step=8"} <= set(case.settings)
