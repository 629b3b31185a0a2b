"""Ranks of a trainer that run out of memory or raise in the middle of a step, in real processes on the CPU."""

import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from .failing_trainer import STANDS_STILL
from .pair import Daemon, gone
from .runs import Run, eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a file with the number of a rank says how that is to fail."""
    folder = tmp_path / "failures"
    folder.mkdir()
    monkeypatch.setenv("FAILURES", str(folder))
    return folder


def fail(failures: Path, rank: int, how: str) -> None:
    """Let `rank` fail; at once, because it may be reading the file."""
    written = failures / "written"
    written.write_text(how)
    written.replace(failures / str(rank))


def trainer_of_three(run: Run, *arguments: str) -> Daemon:
    return run.trainer("--ranks", "3", "--resume", *arguments, module="tests.integration.failing_trainer")


def most_tries(run: Run) -> int:
    """Times that the steps of any batch were begun without the last one ending."""
    with closing(sqlite3.connect(run.config.journal_file)) as journal:
        return int(journal.execute("SELECT max(tries) FROM groups").fetchone()[0])


def test_a_step_that_a_second_signal_cuts_short_is_no_try_of_its_batch(
    start: Callable[..., Run], failures: Path
) -> None:
    run = start(trainer={"max_steps": 500})
    run.producer()
    trainer = run.trainer(module="tests.integration.failing_trainer")
    run.wait_for_step(2)
    fail(failures, 0, STANDS_STILL)
    eventually(lambda: not (failures / "0").exists())
    assert most_tries(run) == 1
    for number in (signal.SIGINT, signal.SIGTERM):  # two of a kind might arrive as one
        trainer.process.send_signal(number)
    assert trainer.end() == 130, trainer.output[-3000:]
    assert most_tries(run) == 0


def test_a_rank_that_fails_is_named_with_its_cause_and_the_run_goes_on(
    start: Callable[..., Run], failures: Path
) -> None:
    run = start(trainer={"max_steps": 500, "save_steps": 2})
    run.producer("first")
    trainer = trainer_of_three(run)
    run.wait_for_step(3)
    fail(failures, 2, "gpu memory")
    began = time.monotonic()
    assert trainer.end() == 71, "however small its passes are made"
    assert time.monotonic() - began < 30  # 1 or so on a machine that is not busy
    assert "no memory for a single completion with its prompt (on rank 2)" in trainer.output
    assert most_tries(run) == 1, "it may be the batch that is too large"

    (failures / "2").unlink()
    fail(failures, 1, "memory")
    run.producer("second")
    trainer = trainer_of_three(run)
    assert trainer.end() == 77
    # As the error that it ends with; or in the log alone, where saying goodbye takes longer than the watch over the ranks waits.
    assert "rank 1 ended (MemoryError: no room for the activations); go on with --resume" in trainer.output
    assert most_tries(run) == 1, "a lost rank costs none"

    (failures / "1").unlink()
    total = run.steps[-1]["step"] + 2
    run.producer("third")
    resumed = trainer_of_three(run, "--set", f"trainer.max_steps={total}")
    assert resumed.end() == 0, resumed.output
    assert "resuming at step" in resumed.output
    assert run.column("step") == list(range(1, total + 1))


def test_rank_0_that_fails_ends_as_a_trainer_alone_does(start: Callable[..., Run], failures: Path) -> None:
    run = start(trainer={"max_steps": 500})
    run.producer()
    trainer = trainer_of_three(run)
    run.wait_for_step(1)
    others = psutil.Process(trainer.process.pid).children()
    assert len(others) == 2
    fail(failures, 0, "fault")
    assert trainer.end() == 70
    assert "ZeroDivisionError: a fault of this rank alone" in trainer.output
    assert "rank 1" not in trainer.output
    assert gone(others)
    assert most_tries(run) == 1
