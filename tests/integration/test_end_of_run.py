"""A run that is stopped or killed after its last step goes on with what is left, and a copy of a run is that run."""

import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from campaigns.chaos import aims
from consumer.learn import checkpoints as checkpoints
from consumer.learn.adapters import TENSORS_FILE
from protocol.config.loader import load_config
from protocol.wire.messages import Group, Lease
from slipstream.cli import run as slipstream
from slipstream.run_reader import EVALUATIONS, RunReader
from tests.scripted import made_up_group

from .runs import Run, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def settings(folder: Path, **trainer: Any) -> dict[str, dict[str, Any]]:
    """Only the last version is evaluated, and no checkpoint is asked for."""
    held_out = {"dataset": {"path": str(folder / "train.jsonl")}, "max_prompts": 3}
    return {
        "evaluation": held_out | {"every_versions": 100, "before_training": False},
        "trainer": {"max_steps": 3, "save_strategy": "no"} | trainer,
    }


def lines(run_dir: str | Path) -> list[dict[str, Any]]:
    return RunReader(Path(run_dir)).lines(EVALUATIONS)


def digest(adapter: Path) -> str:
    return hashlib.sha256((adapter / TENSORS_FILE).read_bytes()).hexdigest()


def is_evaluated(run: Run) -> None:
    """The last version, once, and everything else is there."""
    run_dir = Path(run.config.run_dir)
    assert [(line["version"], line["step"], line["num_scored"]) for line in lines(run_dir)] == [(3, 3, 3)]
    summary = json.loads((run_dir / "trainer.json").read_text())
    assert (summary["finished"], summary["steps"], summary["best"]["version"]) == (True, 3, 3)
    assert digest(run_dir / "adapter") == digest(run.checkpoint(3))
    tensors, best = (load_file(run_dir / place / TENSORS_FILE) for place in ("adapter", "checkpoints/best"))
    assert tensors.keys() == best.keys()
    assert all(torch.equal(tensors[name], best[name]) for name in tensors)
    assert list((run_dir / "evaluation").iterdir()) == []


def test_a_stop_before_the_last_evaluation_is_done_leaves_nothing_but_that_to_do(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(**settings(tmp_path))
    run_dir = Path(run.config.run_dir)
    run.producer()  # which is given no held-out prompts
    trainer = run.trainer()
    run.wait_for_step(3)
    eventually(lambda: list((run_dir / "evaluation").glob("*.adapter")))
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.end() == 0
    assert "stopped before the last evaluation was done; the final adapter is written" in trainer.output
    assert json.loads((run_dir / "trainer.json").read_text())["finished"] is False
    before = run.steps, digest(run_dir / "adapter")
    assert checkpoints.is_committed(run.checkpoint(3))

    run.producer("second", evaluates=True)
    assert run.trainer("--resume").end() == 0
    assert (run.steps, digest(run_dir / "adapter")) == before, "no step is taken again"
    is_evaluated(run)


def test_a_kill_at_any_point_after_the_last_step_undoes_no_step(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(**settings(tmp_path))
    run.producer()  # which is given no held-out prompts: the evaluation would be over before the points that precede it
    taken = None
    at_the_farewell = aims.FINISH.index("farewell.begin")
    for point in (
        "checkpoint.renamed",
        *aims.FINISH[:at_the_farewell],
        *aims.EVALUATION,
        *aims.FINISH[at_the_farewell:],
    ):
        if point == "evaluation.begin":
            run.producer("second", evaluates=True)
        monkeypatch.setenv("TRAINER_DIES_AT", point)
        trainer = run.trainer("--resume", module="tests.integration.mortal_trainer")
        assert trainer.end(90) == -signal.SIGKILL, f"{point}: {trainer.output[-2000:]}"
        taken = taken or run.steps
        assert run.steps == taken, point
    assert [step["step"] for step in taken or []] == [1, 2, 3]
    assert run.trainer("--resume").end() == 0
    assert run.steps == taken
    is_evaluated(run)


def best_is_the_first(lease: Lease, policy_version: int) -> Group:
    """Whichever versions are evaluated: a busy machine may pass over some."""
    return made_up_group(lease, policy_version, rewards=[1 / (1 + policy_version)] if lease.evaluates else None)


def test_a_copy_of_a_live_run_knows_its_evaluations_its_best_and_its_steps(
    start: Callable[..., Run], tmp_path: Path, short_dir: Path
) -> None:
    sections = settings(tmp_path, max_steps=30, save_strategy="steps", save_steps=2, save_total_limit=2)
    sections["evaluation"]["every_versions"] = 1
    run = start(**sections)
    run_dir, copy = Path(run.config.run_dir), tmp_path / "copy"
    run.producer(answer=best_is_the_first, evaluates=True)
    trainer = run.trainer()
    eventually(lambda: len(lines(run_dir)) >= 2)
    seen = lines(run_dir)[:2]
    run.wait_for_step(seen[-1]["step"] + 3)
    assert slipstream(["journal", "--run", str(run_dir), "backup", "--to", str(copy)]) == 0
    trainer.kill()
    found = checkpoints.latest(copy / "checkpoints")
    assert found is not None
    kept = [line for line in lines(run_dir) if line["step"] <= found.step]
    assert kept[:2] == seen
    steps = [line for line in run.steps if line["step"] <= found.step]
    waiting = {int(file.name.split("-")[1]) for file in (copy / "evaluation").iterdir()}
    waiting.add(found.step)  # which may have become due while the copy was made: the run that goes on publishes it anew
    assert {line["version"] for line in kept} <= {line["version"] for line in lines(copy)} | waiting

    there = [f"run_dir={copy}", f"transport.endpoint=ipc://{short_dir}/copy.ipc"]
    run.config = load_config(str(run.config_file), there)
    run.producer("other", answer=best_is_the_first, evaluates=True)
    restored = run.trainer("--resume", "--set", there[0], "--set", there[1])
    assert restored.end(120) == 0, restored.output[-2000:]
    assert run.steps[: found.step] == steps
    assert [step["step"] for step in run.steps] == list(range(1, 31))
    assert lines(copy)[:2] == seen
    assert json.loads((copy / "trainer.json").read_text())["best"]["version"] == seen[0]["version"]
    assert digest(copy / "checkpoints" / "best") == digest(run_dir / "checkpoints" / "best")
    assert lines(copy)[-1]["version"] == 30
