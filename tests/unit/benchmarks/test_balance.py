"""The simulation of ranks: what is drawn is worked by hand, and ours is beside the usual ways."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import balance
from benchmarks.groups import GroupFactory
from consumer.batches.micro_batches import tokens_of
from replay.journal.writer import Journal
from tests.unit.replay.builders import entry


def test_excess_is_over_the_mean_or_the_longest_row() -> None:
    fixed = tokens_of([0], padded=True)
    assert balance.excess([300, 100], [[0], [1]]) == 1.0, "no way gets below the longest row"
    assert balance.excess([100] * 3, [[0, 1, 2], []]) == (fixed + 300) / max((fixed + 300) / 2, fixed + 100)


def test_rows_of_a_journal_have_the_lengths_of_its_groups(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.append([entry(0, frame=GroupFactory(0).frame("0"))])  # 8 x 512 after 128
    assert balance.of_journal(tmp_path)(np.random.default_rng(0), 12) == [640] * 12


@pytest.mark.long
def test_the_simulation_shows_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "WORLDS", (2, 8))
    out, picture = tmp_path / "balance.json", tmp_path / "balance.png"
    balance.main(["--steps", "10", "--out", str(out), "--plot", str(picture)])
    for ways in json.loads(out.read_text())["excess_p95"].values():
        assert ways["ours"][1] < 1.07 < 1.3 < min(ways["[r::world]"][1], ways["equal rows"][1])
    assert picture.stat().st_size > 0
