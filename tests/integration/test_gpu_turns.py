"""Two daemons on one GPU, in turns: never both, nothing lost and nothing trained twice, whoever is killed in whose turn."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ExitCode
from protocol.runtime import json_lines as rotated_lines
from replay.journal.reader import JournalReader
from slipstream.cli import run as slipstream
from tests.integration.one_gpu import happened

from .pair import Daemon
from .runs import Run, eventually
from .test_recovery import adapters, train_again

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]

STEPS = 12
PATIENT = ("--set", "transport.heartbeat_timeout_s=6")
"""On a busy machine a process may rest for seconds. Nobody may take the GPU from one that only rests."""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "gpu"
    file.touch()
    monkeypatch.setenv("ONE_GPU", str(file))
    return file


def in_turns(start: Callable[..., Run], folder: Path, **pipeline: Any) -> Run:
    (folder / "rewards.py").write_text(
        "def reward(completions, **_):\n    return [float(len(text)) for text in completions]\n"
    )
    return start(
        pipeline={"gpu": "turns", "gpu_handover_s": 30, "max_staleness": 1} | pipeline,
        rewards={"functions": [{"function": f"{folder}/rewards.py:reward"}], "num_workers": 1},
        replay={"keep_all": True},
        trainer={"max_steps": STEPS, "save_steps": 4},
        evaluation={"dataset": {"path": f"{folder}/train.jsonl"}, "every_versions": 4, "max_prompts": 3},
    )


def producer(run: Run, name: str) -> Daemon:
    log = run.folder / f"{name}.log"
    daemon = Daemon("tests.integration.turns_producer", log, "--config", str(run.config_file), *PATIENT)
    run.stack.callback(daemon.kill)
    return daemon


def trainer(run: Run, *arguments: str) -> Daemon:
    return run.trainer(*PATIENT, *arguments, module="tests.integration.turns_trainer")


def test_turns_outlive_kills_of_either_side_in_either_turn(
    start: Callable[..., Run], tmp_path: Path, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn_of(side: str) -> None:
        eventually(lambda: happened(gpu)[-1] == f"{side} comes")

    run = in_turns(start, tmp_path)
    first = producer(run, "first")
    monkeypatch.setenv("DIES_IN_TURN", "3")
    dying = trainer(run)
    eventually(lambda: dying.process.poll() is not None)
    assert happened(gpu)[-1] == "trainer comes"
    monkeypatch.setenv("DIES_IN_TURN", "0")
    second = trainer(run, "--resume")
    first.wait_for("the engine is awake")
    run.wait_for_step(4)
    turn_of("producer")
    first.kill()
    other = producer(run, "other")
    run.wait_for_step(6)
    turn_of("producer")
    second.kill()
    third = trainer(run, "--resume")
    run.wait_for_step(8)
    turn_of("trainer")
    other.kill()
    last = producer(run, "last")
    assert third.end(120) == 0, third.last_words
    assert last.end() == 0, last.last_words

    assert run.column("step")[-4:] == list(range(STEPS - 3, STEPS + 1))
    assert sorted(set(run.column("step"))) == list(range(1, STEPS + 1))
    assert slipstream(["journal", "--run", run.config.run_dir, "verify"]) == 0
    with closing(JournalReader(run.config.journal_file)) as reader:
        trained = [lease_id for batch in reader.batches() for lease_id in batch.lease_ids]
    assert len(trained) == len(set(trained)) == 2 * STEPS
    evaluated = {line["version"] for line in rotated_lines.read(Path(run.config.run_dir) / "evaluations.jsonl")}
    assert evaluated >= {0, STEPS}, "the last one after the trainer had left the GPU"
    again = train_again(run)
    assert adapters(Path(run.config.run_dir)) == adapters(again), "weights come and go without losing a bit"
    assert "it sleeps" not in "".join(file.read_text() for file in tmp_path.glob("*.log"))


def test_a_producer_that_stays_on_the_gpu_ends_the_trainer_which_names_it(
    start: Callable[..., Run], tmp_path: Path, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = in_turns(start, tmp_path, gpu_handover_s=0.5)
    monkeypatch.setenv("NEVER_SLEEPS", "1")
    producer(run, "stays")
    waiting = trainer(run)
    assert waiting.end(120) == ExitCode.DEVICE
    assert re.search(r"\S+ did not leave the GPU within .* \(twice pipeline.gpu_handover_s=0.5\)", waiting.output)
    assert happened(gpu) == ["producer comes"]
