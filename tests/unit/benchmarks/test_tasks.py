"""Rows of benchmarks that measured numbers stand on."""

import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.tasks import times_rows, write_rows

SHA256 = {
    "train": "df16399b36e1b3752e644b07b06768f24e7bc013a474a6e51ce14b9e732aa600",
    "eval": "c6e06c854dae237f3d250a4a4de3258794cda11a2749a394717e32b33c032926",
}


@pytest.mark.long  # a child imports reasoning-gym
def test_the_sums_of_smollm2_are_those_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    write_rows(tmp_path)
    found = {name: hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest() for name in SHA256}
    assert found == SHA256


def test_products_are_held_out_in_both_orders() -> None:
    evaluated, trained = times_rows()
    questions = [{row["prompt"][-1]["content"] for row in rows} for rows in (evaluated, trained)]
    assert [len(found) for found in questions] == [40, 81]
    assert set.union(*questions) == {f"What is {a} times {b}?" for a in range(2, 13) for b in range(2, 13)}
    assert {"What is 4 times 8?", "What is 8 times 4?"} <= questions[0]
    encoded = json.dumps([evaluated, trained]).encode()
    assert hashlib.sha256(encoded).hexdigest() == "99c55cdb06dc2dcff45053c51ba77853ecde1a1d4ef641944517849592229da1"
