"""`slipstream reward try` on a real model, and on completions that are given."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from protocol.errors import ExitCode
from slipstream.reward import Group, Trial, report, show
from tests.integration.models import build_model
from tests.integration.warm import WarmProcess

pytestmark = pytest.mark.integration


def tried(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code, and what was said."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    command = ["reward", "try", "--config", str(folder / "run.yaml"), *arguments]
    code = WarmProcess("slipstream", command, log, {}).wait(200)
    return code, log.read_text()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("try")
    build_model("qwen2", folder / "model")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    (folder / "more.py").write_text(
        "def digits(completions, **_):\n    return [sum(map(str.isdigit, c)) for c in completions]\n"
        "def broken(completions, **_):\n    raise ValueError('no judge')\n"
    )
    (folder / "run.yaml").write_text(f"""
run_dir: {folder}/run
model: {{path: {folder}/model, dtype: float32}}
dataset: {{path: {folder}/rows.jsonl}}
sampling: {{max_completion_length: 8}}
rewards:
  num_workers: 1
  functions:
    - function: {folder}/more.py:digits
    - function: exact_match
      weight: 2
    - function: {folder}/more.py:broken
""")
    return folder


def test_real_completions_of_the_model(run_folder: Path) -> None:
    code, output = tried(run_folder, "--n", "4", "--json")
    assert code == ExitCode.DATA_FAILURES, output
    said = json.loads(output.splitlines()[-1])
    assert [group["prompt"] for group in said["groups"]] == ["1+1=", "2+2="]
    for group in said["groups"]:
        assert len(group["completions"]) == 4
        for row in group["completions"]:
            digits = sum(map(str.isdigit, row["completion"]))
            assert row["rewards"]["digits"] == digits
            assert row["sum"] == digits + 2 * row["rewards"]["exact_match"]
            assert row["rewards"]["broken"] is None
    assert said["rewards"]["broken"]["failed"] == 8
    assert "no judge" in said["dead_rewards"][0]
    assert "broken failed to score 8 completions (raised)" in said["warnings"]


def test_given_completions_in_a_table_and_no_signal(run_folder: Path) -> None:
    given = run_folder / "given.jsonl"
    given.write_text('{"prompt": "1+1=", "completions": ["2", "2"], "answer": "2"}\n')
    functions = f"rewards.functions=[{{function: {run_folder}/more.py:digits}}, {{function: exact_match}}]"
    code, output = tried(run_folder, "--completions", str(given), "--set", functions)
    assert code == ExitCode.NO_SIGNAL, output
    assert "warning: group 1: all equal: no signal" in output
    assert "exact_match" in output
    given.write_text('{"prompt": "1+1="}\n')
    code, output = tried(run_folder, "--completions", str(given))
    assert code == ExitCode.DATASET
    assert f"{given}, line 1: KeyError: 'completions'; expected" in output


def test_numbers_of_a_trial_by_hand() -> None:
    groups = [Group("p", {}, ["a", "b", "c"], [[1], [2], [3]]) for _ in range(2)]
    nan = np.nan
    groups[0].rewards = np.array([[1, 2], [3, nan], [nan, nan]], np.float32)
    groups[1].rewards = np.array([[1, 2], [2, 0], [nan, nan]], np.float32)
    trial = Trial(("f", "g"), [1.0, 0.5], groups)
    trial.failures["g", "timeout"] = 1
    trial.seconds["f"] = [0.25, 0.75]
    found = report(trial)
    np.testing.assert_array_equal([row["sum"] for row in found["groups"][0]["completions"]], [2, 3, nan])
    assert found["rewards"]["f"] == {
        "mean": 1.75,
        "std": np.std([1, 3, 1, 2]),
        "missing": 2,
        "failed": 0,
        "call_s": 0.5,
    }
    assert found["rewards"]["g"] | {"call_s": 0} == {
        "mean": pytest.approx(4 / 3), "std": np.std([2, 2, 0]), "missing": 3, "failed": 1, "call_s": 0
    }  # fmt: skip
    assert [group["signal"] for group in found["groups"]] == [True, False]
    assert found["warnings"] == ["g failed to score 1 completions (timeout)", "group 2: all equal: no signal"]
    console = Console(record=True, width=100, file=SimpleNamespace(write=len, flush=lambda: None))  # type: ignore[arg-type]
    show(found, console)
    assert "seconds per call" in console.export_text()
