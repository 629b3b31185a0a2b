"""`make bench-sparse` in its small form: real buffer, journal and trainer, a model that is built on the spot."""

import json
from pathlib import Path

import pytest

from .warm import run_to_its_end


@pytest.mark.integration
@pytest.mark.timeout(280)
def test_the_benchmark_of_sparse_rewards_counts_every_generated_token(short_dir: Path) -> None:
    out = short_dir / "sparse"
    arguments = ["--quick", "--out", str(out), "--plot", str(out / "sparse.png")]
    run_to_its_end("benchmarks.sparse", arguments, short_dir / "log", 270)
    report = json.loads((out / "results.json").read_text())
    runs = {run["arm"]: run for run in report["runs"]}
    assert runs.keys() == {"plain", "all"}
    for run in runs.values():
        counts = run["counts"]
        assert run["tokens"] >= report["plan"]["budget_tokens"]
        assert counts["leased"] == counts["accepted"] + counts.get("no_signal", 0)
        completions = counts["leased"] * report["plan"]["num_generations"]
        assert completions <= run["tokens"] <= 5 * completions
        assert run["steps"] * run["groups_per_step"] == counts["trained"] + counts["replayed"]
    assert runs["plain"]["counts"].get("no_signal", 0) == 0
    assert runs["all"]["counts"]["rerolls_leased"] > 0
    assert runs["all"]["counts"]["replayed"] > 0
    assert (out / "sparse.png").stat().st_size > 5_000
