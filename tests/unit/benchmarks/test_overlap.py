"""The pure parts of `benchmarks.overlap`, with numbers worked by hand."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap import cases
from benchmarks.overlap_report import (
    ITS_OWN,
    OWN,
    TRL,
    cost,
    curve,
    draw,
    fastest,
    quartiles,
    ratios,
    sampled_per_s,
    step_s,
    table,
    trained_per_s,
    waits,
)


def result(arm: str, times: list[float], *, inflight: int = 0, number: int = 1, scale: float = 1.0) -> dict[str, Any]:
    """A run whose first three steps ended at 1, 2 and 3. Its checkpoints cost `scale`."""
    at = [1.0, 2.0, 3.0, *times]
    points = [[0.0, 0, 0, 0.6], [2.0, 2, 100, 0.7], [4.0, 4, 200, 0.9], [6.0, 6, 300, 1.0]]
    return {
        "task": "sums", "arm": arm, "staleness": 1, "inflight": inflight, "round": number, "steps": len(at), "dropped": 24,
        "steps_of": {"t": at, "wait_s": [0.5] * len(at), "tokens": [60] * len(at)},
        "accuracy": [[seconds * scale, step, tokens * scale, score] for seconds, step, tokens, score in points],
    }  # fmt: skip


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_rates_are_those_after_the_first_three_steps() -> None:
    one = result(OWN, [5.0, 7.0])
    assert step_s(one) == 2.0
    assert trained_per_s(one) == 2 * 60 / 4.0
    assert waits(one) == 2 * 0.5 / 4.0
    assert sampled_per_s(one) == 300 / 6.0


def test_the_fastest_setting_of_trl_is_that_of_the_first_round() -> None:
    runs = [result(TRL, [4.0, 7.0], inflight=16), result(TRL, [4.0, 6.0], inflight=32)]
    assert fastest([*runs, result(TRL, [4.0, 4.5], inflight=16, number=2)], "sums") == 32
    assert fastest([*runs, result(TRL, [4.0, 8.0], inflight=64, scale=0.9)], "sums") == 64, "it was near the end sooner"


def test_trl_has_one_row_where_its_own_setting_is_the_fastest() -> None:
    runs = [result(TRL, [4.0, 6.0], inflight=ITS_OWN), result(TRL, [4.0, 7.0], inflight=32)]
    assert [row[1] for row in cells(table(runs))] == ["TRL, default"]


def test_trl_is_tuned_in_the_first_round_and_arms_go_back_in_the_second() -> None:
    known = [
        result(TRL, [4.0, seconds], inflight=inflight) for inflight, seconds in ((ITS_OWN, 9.0), (16, 7.0), (32, 8.0))
    ]
    options = Namespace(task="sums", arms=[OWN, TRL], inflight=[ITS_OWN, 16, 32], rounds=2, staleness=1, steps=None)
    found = [(case.round, case.arm, case.inflight) for case in cases(options, known)]
    first = [(1, OWN, 0), (1, TRL, ITS_OWN), (1, TRL, 16), (1, TRL, 32)]
    assert found == [*first, (2, TRL, 16), (2, TRL, ITS_OWN), (2, OWN, 0)]
    options.inflight = [16, 32]
    assert [case.inflight for case in cases(options, known)] == [0, 16, 32, 16, 0]
    options.arms = [OWN]
    assert [case.round for case in cases(options, [])] == [1, 2]


def test_a_cost_lies_between_those_of_two_checkpoints() -> None:
    one = result(OWN, [])
    assert (cost(one, 0.80, 0), cost(one, 0.95, 2)) == (pytest.approx(3.0), pytest.approx(250))
    assert cost(one, 1.1, 0) is None


@pytest.mark.parametrize(("values", "expected"), [([1.0, 2.0, 3.0, 4.0, 5.0], (2.0, 4.0)), ([1.0], (1.0, 1.0))])
def test_quartiles_by_hand(values: list[float], expected: tuple[float, float]) -> None:
    assert quartiles(values) == expected


def runs() -> list[dict[str, Any]]:
    """Three rounds of ours, two of TRL's own setting, and one of two others, of which the fastest is 32."""
    ours = [result(OWN, [4.0, 5.0], number=number, scale=2.0 * number) for number in (1, 2, 3)]
    theirs = [result(TRL, [5.0, 7.0], inflight=ITS_OWN, number=number, scale=4.0) for number in (1, 2)]
    tuned = [result(TRL, [4.0, 4.0 + seconds], inflight=inflight) for inflight, seconds in ((16, 3.0), (32, 2.0))]
    return [*ours, *theirs, *tuned]


def test_the_table_has_medians_and_quartiles_of_each_arm() -> None:
    ours, tuned, default = cells(table(runs()))
    assert ours == [
        "sums (0.80, 0.95)", OWN, "3", "12.0 (9.0 to 15.0)", "20.0 (15.0 to 25.0)", "600 (450 to 750)", "1,000 (750 to 1,250)",
        "60", "50", "50%", "24", "1.000",
    ]  # fmt: skip
    assert [row[1] for row in (tuned, default)] == ["TRL, tuned (32 in flight)", "TRL, default"]
    assert [row[3] for row in (tuned, default)] == ["3.0", "12.0 (12.0 to 12.0)"]


def test_ratios_are_of_medians_and_their_quartiles_of_pairs() -> None:
    tuned, default = cells(ratios(runs()))
    assert tuned[:4] == ["sums", OWN, "TRL, tuned", "4.00 (2.00 to 2.00), 1 of 3"]
    assert default[3:] == ["1.00 (0.62 to 0.88), 2 of 3"] * 4  # of 2/4 and 4/4, and of the medians 4 and 4


def test_a_goal_that_no_run_reached_is_said() -> None:
    one = result(OWN, [4.0, 5.0])
    one["accuracy"][-1][3] = 0.9
    assert cells(table([one]))[0][4] == "- (0 of 1)"


def test_a_band_goes_as_far_as_all_runs() -> None:
    places, low, middle, high = curve([result(OWN, [], scale=scale) for scale in (1.0, 2.0, 2.0)], 0)
    assert places[-1] == 6.0
    assert (low[-1], middle[-1], high[-1]) == (pytest.approx(0.8), pytest.approx(0.8), pytest.approx(1.0))


@pytest.mark.long
def test_the_picture_is_small(tmp_path: Path) -> None:
    draw([one | {"task": task} for one in runs() for task in ("sums", "smollm2", "lcm", "times")], tmp_path / "one.png")
    assert 1000 < (tmp_path / "one.png").stat().st_size < 120_000
