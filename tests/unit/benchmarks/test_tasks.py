"""Rows of benchmarks that measured numbers stand on."""

import hashlib
from pathlib import Path

import pytest

from benchmarks.tasks import write_rows

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
