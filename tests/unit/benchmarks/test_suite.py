"""The suite runs all that the Makefile calls a benchmark, and goes on after a failure."""

import json
from pathlib import Path

from benchmarks.suite import benchmarks, run, summary


def test_the_suite_runs_every_benchmark_of_the_makefile(tmp_path: Path) -> None:
    makefile = "unit: ## no\nbench-b: $(STAMP) ## x\n\tfalse\nbench: all\n\nbench-a: ## y\n\ttrue\n"
    assert benchmarks(makefile) == ["bench-b", "bench-a"]
    commands = {"bench-a": ["true"], "bench-b": ["sh", "-c", "echo why; exit 3"]}
    results = [run(name, command, tmp_path) for name, command in commands.items()]
    assert [(one["benchmark"], one["exit_code"]) for one in results] == [("bench-a", 0), ("bench-b", 3)]
    assert (tmp_path / "bench-b.log").read_text() == "why\n"
    text = summary(results)
    assert "| bench-a | done |" in text
    assert "| bench-b | FAILED (3) |" in text
    json.dumps(results)
