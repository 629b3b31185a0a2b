"""`make demo` does what the README says, with another seed than the default one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIELDS = {
    *("reward_first", "reward_last", "eval_before", "eval_after", "steps", "policy_versions", "groups_trained"),
    *("tokens_generated", "wall_s", "trainer_wait_s", "producer_idle_s", "overlap_efficiency"),
    *("swap_p50_ms", "swap_p99_ms"),
}


@pytest.mark.integration
@pytest.mark.timeout(500)
def test_the_demo_learns_to_carry(short_dir: Path) -> None:
    command = [sys.executable, "-m", "examples.arithmetic.demo", "--seed", "2", "--run-dir", str(short_dir / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = json.loads((short_dir / "demo" / "summary.json").read_text())
    assert summary.keys() >= FIELDS
    assert summary["eval_after"] >= 0.9
    assert summary["eval_after"] - summary["eval_before"] >= 0.25
    assert summary["policy_versions"] >= 20
    assert summary["overlap_efficiency"] >= 0.8
    assert summary["reward_last"] > summary["reward_first"]
    assert (short_dir / "demo" / "reward.png").stat().st_size > 10_000
