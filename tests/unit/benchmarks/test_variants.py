"""Settings and figures of `benchmarks.variants`."""

import pytest

from benchmarks.tasks import TASKS, smollm2_easy, sums_easy
from benchmarks.variants import SETS, TURNS, Case
from benchmarks.variants_report import SHARE, cost_of, table
from protocol.config.loader import load_config


@pytest.mark.parametrize(
    ("task", "variant"),
    [
        (task, variant)
        for task in ("sums", "smollm2", "digits", "calculator")  # others have the configuration of one of these
        for variants in SETS.values()
        for variant in variants
        if (variants is TURNS) == (task == "calculator")
    ],
)
def test_every_variant_is_a_configuration(task: str, variant: str) -> None:
    case = Case(task, variant, 3, 40)
    taught = [*case.taught, "teachers=[{name: one, url: 'http://127.0.0.1:1'}]"] if case.taught else []
    config = load_config(TASKS[task].config, [*case.settings, *taught])
    assert (config.seed, config.trainer["max_steps"], config.trainer["save_steps"]) == (3, 40, 4)
    assert len(config.dataset.sources) == (2 if "source" in variant else 0)


def test_rows_are_easy_or_hard() -> None:
    assert sums_easy({"prompt": "34+15="})
    assert not sums_easy({"prompt": "35+15="})
    assert smollm2_easy({"prompt": [{"role": "user", "content": "Calculate 7 - 5. Answer with the number alone."}]})
    assert not smollm2_easy(
        {"prompt": [{"role": "user", "content": "Calculate 17 - 5. Answer with the number alone."}]}
    )


def test_a_run_until_some_tokens_saves_as_often_whatever_its_batches() -> None:
    for groups, save_steps in ((8, 6), (16, 3), (32, 1)):  # 62, 31 and 15 steps of completions of at most 5 tokens
        case = Case("sums", f"full, {groups} groups", 3, 40, tokens=20_000)
        assert load_config(TASKS["sums"].config, case.settings).trainer["save_steps"] == save_steps


def line(variant: str, seed: int, last: float) -> dict:
    return {
        "task": "digits",  # which names no accuracies
        "variant": variant,
        "seed": seed,
        "accuracy": [[10.0, 1, 100, 0.2], [20.0, 2, 150, 0.8], [30.0, 3, 180, last]],
        "outcomes": {"accepted": 3, "no_signal": 1},
        "steps_of": {"t": [0.0, 10.0, 20.0], "wait_s": [9.0, 2.0, 4.0], SHARE: [None, 0.5, 0.7]},
    }


def test_costs_lie_between_those_of_two_checkpoints() -> None:
    one = line("a", 1, 0.9)
    assert [cost_of(one, 0.8, column) for column in range(3)] == [20.0, 2, 150]
    assert cost_of(one, 0.85, 2) == pytest.approx(165)
    assert cost_of(one, 0.1, 2) == 100
    assert cost_of(one, 0.95, 0) is None


def test_a_row_has_medians_of_the_runs_that_reached_the_goal() -> None:
    text = table([line("a", 1, 0.9), line("a", 2, 0.7), line("b", 1, 1.0)])
    first, second = text.splitlines()[2:]
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        "a", "2", "0.800", "30 (1 of 2)", "3 (1 of 2)", "180 (1 of 2)", "75%", "30%", "0.600",
    ]  # fmt: skip
    assert second.split("|")[4].strip() == "25 (1 of 1)"
