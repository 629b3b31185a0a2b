"""The pure parts of `benchmarks.overlap`, with numbers worked by hand."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap_report import (
    OWN,
    TRL,
    draw,
    fastest,
    quartiles,
    seconds_to,
    step_s,
    sync_s,
    table,
    tokens_to,
    trained_per_s,
    walls,
)


def result(arm: str, times: list[float], *, staleness: int = 1, inflight: int = 0, **others: Any) -> dict[str, Any]:
    """A run whose first steps ended at 0, 1, 2 and 3."""
    at = [0.0, 1.0, 2.0, 3.0, *times]
    found = {
        "task": "sums",
        "arm": arm,
        "staleness": staleness,
        "inflight": inflight,
        "round": 1,
        "dropped": 0,
        "steps": 8,
    }
    each: dict[str, list[float]] = {"wait_s": [0.5], "step_s": [1.25], "sync_s": [0.125], "tokens": [60]}
    steps_of = {"t": at} | {name: value * len(at) for name, value in each.items()}
    found |= {"steps_of": steps_of, "cpu_share": {"engine": 0.5}, "peak_memory": 2**30}
    return found | {"accuracy": [[2.0, 2, 0.5], [5.0, 4, 0.9], [7.0, 6, 0.8]]} | others


def test_steps_are_timed_after_the_first_five() -> None:
    one = result(OWN, [4.0, 6.0, 10.0])
    assert walls(one) == [2.0, 4.0]
    assert step_s(one) == 3.0


def test_tokens_and_syncs_of_the_same_steps() -> None:
    ours, theirs = (result(arm, [4.0, 6.0, 10.0]) for arm in (OWN, TRL))
    assert trained_per_s(ours) == 2 * 60 / (2.0 + 4.0)
    assert sync_s(ours) == 3.0 - 0.5 - 1.25
    assert sync_s(theirs) == 0.125


def test_the_fastest_setting_of_trl_is_that_of_the_first_round() -> None:
    runs = [result(TRL, [4.0, 7.0], inflight=16), result(TRL, [4.0, 6.0], inflight=32)]
    runs += [result(TRL, [4.0, 5.0], inflight=64, staleness=2), result(TRL, [4.0, 4.5], inflight=16, round=2)]
    assert fastest(runs, "sums", 1) == 32


def test_the_time_to_an_accuracy_is_that_of_the_first_checkpoint_which_has_it() -> None:
    assert seconds_to(result(OWN, []), 0.8) == 5.0
    assert seconds_to(result(OWN, []), 0.95) is None


def test_tokens_to_an_accuracy_are_those_sampled_by_the_step_of_its_checkpoint() -> None:
    one = result(OWN, [])
    assert tokens_to(one, 0.8) is None  # runs of earlier commits did not count them
    one["steps_of"]["sampled"] = [10, 25, 40, 60]
    assert tokens_to(one, 0.8) == 60
    assert tokens_to(one, 0.95) is None


def test_the_table_compares_runs_of_one_round_and_one_staleness() -> None:
    ours = result(OWN, [4.0, 6.0, 8.0])
    theirs = result(TRL, [4.0, 9.0, 14.0], inflight=32, dropped=24)
    elsewhere = result(TRL, [4.0, 9.0, 14.0], inflight=32, staleness=4)
    longer, in_turns = theirs | {"steps": 90}, result(OWN, [4.0, 8.0, 12.0], staleness=0)
    text = table([ours, theirs, elsewhere, longer, in_turns])
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()[2:]]
    assert [row[1:5] for row in rows] == [
        [TRL, "1", "32", "8"], [TRL, "1", "32", "90"], [TRL, "4", "32", "8"], [OWN, "0", "-", "8"], [OWN, "1", "-", "8"],
    ]  # fmt: skip
    assert [row[7] for row in rows] == ["2.50", "2.50", "-", "2.00", "1.00"]
    assert rows[0][12] == "24"


@pytest.mark.parametrize(("values", "expected"), [([1.0, 2.0, 3.0, 4.0, 5.0], (2.0, 4.0))])
def test_quartiles_by_hand(values: list[float], expected: tuple[float, float]) -> None:
    assert quartiles(values) == expected


def test_the_picture_is_wider_where_sampled_tokens_were_counted(tmp_path: Path) -> None:
    sizes = []
    for counted in ({}, {"sampled": [10, 25, 40, 60, 70, 80]}):
        runs = [result(OWN, [4.0, 6.0]), result(OWN, [4.0, 8.0], staleness=0), result(TRL, [4.0, 9.0], inflight=32)]
        for one in runs:
            one["steps_of"] |= counted
        draw(runs, tmp_path / "picture.png")
        sizes.append(int.from_bytes((tmp_path / "picture.png").read_bytes()[16:20]))  # the width of a PNG
    assert sizes[1] > sizes[0]
