"""`make bench-offpolicy` in its quick form: real training at scripted staleness, tables, picture, nothing run twice."""

import json
from pathlib import Path

import pytest

from .models import build_model
from .warm import run_to_its_end


@pytest.mark.integration
def test_the_quick_form_measures_and_repeats_nothing(tmp_path: Path) -> None:
    base = build_model("qwen2", tmp_path / "base")
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 40)]
    for name in ("train", "eval"):
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, plot = tmp_path / "out", tmp_path / "offpolicy.png"
    arguments = ["--quick", "--workers", "1", "--base", str(base), "--out", str(out), "--plot", str(plot)]

    run_to_its_end("benchmarks.offpolicy", arguments, tmp_path / "log", 200)
    runs = json.loads((out / "results.json").read_text())["scripted"]
    assert len(runs) == 4
    # Of four steps the first two cannot be two versions behind: 0, 1, 2, 2.
    assert all(run["staleness"] == {0: 0.0, 2: 1.25}[run["case"]["staleness"]] for run in runs)
    assert all([step for step, _ in run["curve"]] == [0, 2, 4] for run in runs)
    assert plot.stat().st_size > 10_000

    files = sorted(out.glob("*-seed1.json"))
    written = [file.stat().st_mtime_ns for file in files]
    run_to_its_end("benchmarks.offpolicy", arguments, tmp_path / "log", 200)
    assert len(files) == 4
    assert [file.stat().st_mtime_ns for file in files] == written
