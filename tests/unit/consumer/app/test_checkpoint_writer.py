"""Checkpoints on disks that fill up: whole or absent, waited for, and with the state of their moment."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consumer.app.run import Run
from consumer.app.setup import RunStart
from consumer.learn import checkpoints as checkpoints
from consumer.waiting import StopRequested, WaitPolicy
from protocol.errors import StalledError
from tests.unit.consumer.builders import Clock


class Saving:
    """A writer with a checkpoint of step 3, and a disk that `write` fills until `room_at`."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock = clock
        self.checkpoints_dir = folder / "checkpoints"
        self.checkpoints_dir.mkdir()
        self.staged = checkpoints.staging(self.checkpoints_dir) / "checkpoint-3"
        self.error: Exception | None = None
        self.room_at = float("inf")
        self.stop_at = float("inf")
        self.attempts = 0
        self.events: list[str] = []
        self.said: list[str] = []
        waits = WaitPolicy(check=self.check, say=self.said.append, stall_timeout_s=60.0)
        unused: Any = None
        setup: Any = SimpleNamespace(
            config=SimpleNamespace(checkpoints_dir=self.checkpoints_dir, changes_base=False),
            checkpoint_limit=None,
            settings={},
        )
        self.run = Run(setup, RunStart("run"), unused, waits, unused)
        self.run._snapshots = unused
        self.run.state = lambda: {"journal_seq": 7}
        self.run.checkpointed = lambda: self.events.append("checkpointed")

    def check(self) -> None:
        if self.clock.now >= self.stop_at:
            raise StopRequested

    def write(self) -> None:
        assert not self.staged.exists(), "every attempt starts anew"
        self.attempts += 1
        self.staged.mkdir(parents=True)
        (self.staged / "part").write_text("weights")
        if self.error is not None and self.clock.now < self.room_at:
            raise self.error

    def save(self) -> None:
        self.run.commit_checkpoint(3, self.staged, self.write)


@pytest.fixture
def saving(tmp_path: Path, clock: Clock) -> Saving:
    return Saving(tmp_path, clock)


ENOSPC = OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_holds_the_state_of_its_moment(saving: Saving) -> None:
    saving.save()
    assert checkpoints.latest(saving.checkpoints_dir) == (
        saving.checkpoints_dir / "checkpoint-3",
        {"journal_seq": 7, "step": 3, "run_id": "run", "settings": {}},
    )
    assert (saving.attempts, saving.events) == (1, ["checkpointed"])


def test_a_full_disk_is_waited_for_and_the_checkpoint_written_anew(saving: Saving, usage: SimpleNamespace) -> None:
    usage.free = 10**9
    saving.error, saving.room_at = ENOSPC, 1011.0
    saving.save()
    assert saving.attempts == 45, "four times a second"
    assert saving.said == ["waiting for room for a checkpoint (10 s): the disk of run_dir is full"]
    assert checkpoints.is_committed(saving.checkpoints_dir / "checkpoint-3")
    assert saving.events == ["checkpointed"]


def test_the_error_of_a_library_on_a_full_disk_is_one_of_the_disk(saving: Saving, usage: SimpleNamespace) -> None:
    usage.free = 2**20 - 1
    saving.error, saving.room_at = RuntimeError("PytorchStreamWriter failed writing file"), 1001.0
    saving.save()
    assert saving.attempts == 5
    assert checkpoints.is_committed(saving.checkpoints_dir / "checkpoint-3")


def test_no_room_for_the_last_of_it_is_waited_for_too(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    original, refusals = checkpoints.commit, iter([ENOSPC, ENOSPC])

    def commit(staged: Path, state: dict[str, Any]) -> None:
        error = next(refusals, None)
        if error is not None:
            raise error
        original(staged, state)

    monkeypatch.setattr(checkpoints, "commit", commit)
    saving.save()
    assert saving.attempts == 3
    assert checkpoints.is_committed(saving.checkpoints_dir / "checkpoint-3")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.EIO, "Input/output error")])
def test_any_other_error_ends_the_run(saving: Saving, usage: SimpleNamespace, error: Exception) -> None:
    usage.free = 2**20
    saving.error = error
    with pytest.raises(type(error)) as caught:
        saving.save()
    assert caught.value is error
    assert (saving.attempts, saving.events) == (1, [])
    assert checkpoints.latest(saving.checkpoints_dir) is None


@pytest.mark.parametrize(
    ("stop_at", "ending"), [(1005.0, StopRequested), (float("inf"), StalledError)], ids=["stop", "stall"]
)
def test_a_disk_that_stays_full_ends_in_a_stop_or_a_stall_and_leaves_nothing_behind(
    saving: Saving, stop_at: float, ending: type[Exception]
) -> None:
    saving.error, saving.stop_at = ENOSPC, stop_at
    with pytest.raises(ending):
        saving.save()
    assert saving.events == []
    assert list(saving.checkpoints_dir.iterdir()) == []


def test_what_another_process_left_in_staging_is_cleared_first(saving: Saving) -> None:
    left = checkpoints.staging(saving.checkpoints_dir) / "checkpoint-2"
    left.mkdir(parents=True)
    saving.save()
    assert not left.exists()
