"""A disk that fails under the journal: the trainer ends at once and says why, and has acknowledged nothing that is not there.

Once inside the process, where the disk also forgets what it could not write; once by strace, in the kernel's answers.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from replay.journal.reader import JournalReader
from tests.integration.runs import eventually

from .run_under_test import Process, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def fail_every(calls: str, stack: ExitStack, process_id: int) -> None:
    """From now on these system calls of the process fail, as the kernel reports a disk that cannot be written."""
    if shutil.which("strace") is None:
        pytest.skip("this machine has no strace")
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(process_id), "-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(tracer.wait, 10)
    stack.callback(tracer.kill)
    assert tracer.stderr is not None
    stack.callback(tracer.stderr.close)
    first = tracer.stderr.readline()
    if "attached" not in first:
        pytest.skip(f"this machine does not let strace attach: {first.strip()}")


@pytest.mark.parametrize("by", ["vfs", "strace"])
def test_a_failing_disk_ends_the_trainer_and_costs_no_group(
    by: str, tmp_path: Path, make_run: Callable[..., Run], stack: ExitStack
) -> None:
    failing = tmp_path / "failing"
    run = make_run(trainer={"max_steps": 30, "save_steps": 4})
    producer = run.producer()
    module = "tests.faults.trainer_on_failing_disk" if by == "vfs" else "consumer.cli"
    trainer = run.trainer(module=module, FAILING_DISK=str(failing))
    run.wait_for_step(6)
    if by == "vfs":
        failing.touch()
    else:
        fail_every("fsync,fdatasync", stack, trainer.process.pid)
    last_words = last_words_of(trainer)
    assert f"{run.config.journal_file} cannot be written or read (" in last_words
    assert "look at the disk, then start again" in last_words

    with closing(JournalReader(run.config.journal_file)) as journal:
        written = {row.group_id for row in journal.rows()}
    acknowledged = {ack.group_id for ack in run.acks}
    assert acknowledged
    assert acknowledged <= written
    failing.unlink(missing_ok=True)

    again = run.trainer("--resume")
    since = time.time()
    eventually(lambda: run.acks[-1].at > since, 60)
    run.finish(again, producer)


def test_a_disk_that_fails_under_a_checkpoint_is_no_bug(make_run: Callable[..., Run], stack: ExitStack) -> None:
    """The journal syncs by fdatasync, a checkpoint by fsync."""
    run = make_run(trainer={"max_steps": 500, "save_steps": 6})
    run.producer()
    trainer = run.trainer()
    run.wait_for_step(2)
    fail_every("fsync", stack, trainer.process.pid)
    last_words = last_words_of(trainer)
    assert "a disk failed ([Errno 5] Input/output error" in last_words
    assert f"look at that of run_dir {run.config.run_dir}, then go on with --resume" in last_words
    assert not list(run.config.checkpoints_dir.glob("checkpoint-*"))


def last_words_of(trainer: Process) -> str:
    assert trainer.end() == ExitCode.JOURNAL == 74
    assert "Traceback" not in trainer.output
    last = trainer.output.strip().splitlines()[-1]
    assert "rl-trainer: error: " in last
    return last
