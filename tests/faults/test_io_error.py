"""A disk that fails under the journal: the trainer ends at once and says why, and has acknowledged nothing that is not there.

Once inside the process, where the disk also forgets what it could not write; once by strace, in the kernel's answers.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from replay.journal.reader import JournalReader
from tests.integration.pair import Daemon
from tests.integration.runs import eventually

from .run_under_test import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@contextmanager
def fsync_failing(process_id: int) -> Iterator[None]:
    """Meanwhile every fsync of the process fails, as the kernel reports a disk that cannot be written."""
    if shutil.which("strace") is None:
        pytest.skip("this machine has no strace")
    command = ["strace", "-f", "-p", str(process_id), "-e", "trace=fsync", "-e", "inject=fsync:error=EIO"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            first = tracer.stderr.readline()
            if "attached" not in first:
                pytest.skip(f"this machine does not let strace attach: {first.strip()}")
            yield
        finally:
            tracer.kill()


def test_a_failing_disk_ends_the_trainer_and_costs_no_group(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    failing = tmp_path / "failing"
    run = make_run(trainer={"max_steps": 30, "save_steps": 4})
    producer = run.producer()
    trainer = run.trainer(module="tests.faults.failing_disk_trainer", FAILING_DISK=str(failing))
    run.wait_for_step(6)
    failing.touch()
    last_words = last_words_of(trainer)
    assert f"{run.config.journal_file} cannot be written or read (" in last_words
    assert "check the disk, then start again" in last_words

    with closing(JournalReader(run.config.journal_file)) as journal:
        written = {row.lease_id for row in journal.rows()}
    acknowledged = {ack.lease_id for ack in run.acks}
    assert acknowledged
    assert acknowledged <= written
    failing.unlink()

    again = run.trainer("--resume")
    since = time.time()
    eventually(lambda: run.acks[-1].at > since, 60)
    run.finish(again, producer)


def test_a_disk_that_fails_under_a_checkpoint_is_no_bug(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    """The journal syncs by fdatasync, a checkpoint by fsync."""
    run = make_run(trainer={"max_steps": 500, "save_steps": 6})
    barrier = tmp_path / "checkpoints.wait"
    barrier.touch()
    run.producer()
    trainer = run.trainer(module="tests.faults.waiting_trainer", CHECKPOINTS_WAIT=str(barrier))
    eventually(barrier.with_suffix(".reached").exists)
    with fsync_failing(trainer.process.pid):
        barrier.unlink()
        last_words = last_words_of(trainer)
    assert "a disk failed ([Errno 5] Input/output error" in last_words
    assert f"look at that of run_dir {run.config.run_dir}, then go on with --resume" in last_words
    assert not list(run.config.checkpoints_dir.glob("checkpoint-*"))


def last_words_of(trainer: Daemon) -> str:
    assert trainer.end() == ExitCode.JOURNAL == 74
    assert "Traceback" not in trainer.output
    last = trainer.output.strip().splitlines()[-1]
    assert "rl-trainer: error: " in last
    return last
