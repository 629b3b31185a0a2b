"""The simulation of ranks: what is drawn is worked by hand, and ours is beside the usual ways."""

import json
from pathlib import Path

import pytest

from benchmarks import balance
from consumer.batches.micro_batches import tokens_of


def test_excess_is_over_the_mean_or_the_longest_row() -> None:
    fixed = tokens_of([0], padded=True)
    assert balance.excess([300, 100], [[0], [1]]) == 1.0, "no way gets below the longest row"
    assert balance.excess([100] * 3, [[0, 1, 2], []]) == (fixed + 300) / max((fixed + 300) / 2, fixed + 100)


@pytest.mark.long
def test_the_simulation_shows_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "WORLDS", (2, 8))
    out, picture = tmp_path / "balance.json", tmp_path / "balance.png"
    balance.main(["--steps", "10", "--out", str(out), "--plot", str(picture)])
    for ways in json.loads(out.read_text())["excess_p95"].values():
        assert ways["ours"][1] < 1.07 < 1.3 < min(ways["[r::world]"][1], ways["equal rows"][1])
    assert picture.stat().st_size > 0
