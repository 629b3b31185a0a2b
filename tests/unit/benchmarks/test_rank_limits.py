"""The arithmetic of rings by hand, and the measurement in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rank_limits import Link, measure_own_work, ring_s


def test_a_ring_moves_nearly_twice_the_gradients_over_each_link() -> None:
    link = Link(bytes_per_s=1e9, turn_s=1e-4)
    assert ring_s(80e6, 2, link) == pytest.approx(0.080 + 2e-4)
    assert ring_s(80e6, 64, link) == pytest.approx(0.1575 + 126e-4)


def test_the_plan_grows_with_the_ranks() -> None:
    few, many = (measure_own_work(world)["plan_bytes"] for world in (2, 4))
    assert 1.99 < many / few < 2.01
    assert few > 2 * 8 * 512 * 8, "ids and log-probs of two groups of 8 completions of 512 tokens"


@pytest.mark.long
def test_ranks_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    command = [sys.executable, "-m", "benchmarks.rank_limits", "--worlds", "3", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(out.read_text())["exchanges"]["3"].values():
        assert found["wall_s"] > 0
    assert "all-reduce on paper" in done.stdout
