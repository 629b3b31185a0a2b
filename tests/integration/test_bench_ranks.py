"""The benchmark of ranks, in small: one process, two ranks and TRL's two processes compute the same loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "dtype": "float32"}  # fmt: skip


def test_two_ranks_beside_one_and_beside_trl(tmp_path: Path) -> None:
    size = {"model": TINY, "num_prompts": 2, "median_tokens": 8, "max_tokens": 16, "prompt_tokens": 8}
    out = tmp_path / "ranks.json"
    command = [sys.executable, "-m", "benchmarks.ranks", "--repetitions", "2", "--size", json.dumps(size)]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert report["losses"].keys() == report["tokens_per_s"].keys() == {"one", "ranks", "trl"}
    for found in (report["losses"], report["gradient_norms"]):
        assert found["one"] == pytest.approx(found["ranks"], rel=1e-5)
        assert abs(found["one"]) > 1e-4
    assert report["exchange"]["gradients_s"] > 0
    assert "2 ranks are " in done.stdout
