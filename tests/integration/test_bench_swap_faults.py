"""Swaps of a real engine in bfloat16 are proved by bits and by behaviour: the benchmark of faults on a small model."""

import json
from pathlib import Path

import pytest

from benchmarks import swap_faults
from tests.integration.models import build_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", ["adapter", "merged"])
def test_faults_are_refused_and_right_swaps_are_not(tmp_path: Path, mode: str) -> None:
    model, out = build_model("llama", tmp_path / "model", num_layers=2), tmp_path / "faults.jsonl"
    swap_faults.main(["--model", str(model), "--mode", mode, "--lr", "2e-3", "--versions", "3", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["false_alarms"] == 0
    assert found["by_bits"] == dict.fromkeys(swap_faults.FAULTS, 1)
    assert {"base", "version before", "another adapter", "alpha 0.5"} <= found["by_behaviour"].keys()
