"""A run of a benchmark is made once, and each result tells where it comes from."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.finished_runs import FinishedRuns
from benchmarks.made_on import made_on

_RESULTS = sorted(Path("benchmarks/results").iterdir())
_MADE_ON = {"machine", "commit", "command", "at"}


class Case(NamedTuple):
    task: str
    seed: int


def test_a_run_is_made_once_and_a_later_start_knows_it(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    first = FinishedRuns(file).make(Case("sums", 1), lambda case: case._asdict() | {"accuracy": 0.5})
    again = FinishedRuns(file)
    assert again.make(Case("sums", 1), lambda case: pytest.fail("it was made before")) is None
    assert again.lines == [first]
    assert again.make(Case("sums", 2), lambda case: case._asdict()) is not None
    assert [json.loads(line)["seed"] for line in file.read_text(encoding="utf-8").splitlines()] == [1, 2]


def test_a_result_tells_machine_commit_command_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["/somewhere/bin/python", "-m", "benchmarks.variants", "swaps", "--variants", "adapter, finish"]
    monkeypatch.setattr("sys.orig_argv", arguments)
    made = made_on()
    assert set(made) == _MADE_ON
    assert made["command"] == "python -m benchmarks.variants swaps --variants 'adapter, finish'"


def test_a_result_is_made_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no checkout
    assert made_on()["commit"] == "unknown"
    monkeypatch.setenv("PATH", "")
    assert made_on()["commit"] == "unknown"


@pytest.mark.parametrize("file", _RESULTS, ids=lambda file: file.name)
def test_every_published_result_tells_where_it_comes_from(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        report = json.loads(text)
        results = report.get("runs", [report])
    else:
        results = [json.loads(line) for line in text.splitlines()]
    assert all(set(one) >= _MADE_ON and all(one[name] for name in _MADE_ON) for one in results)
