"""A disk that runs full under a real trainer: nothing is lost, nothing crashes, and it goes on by itself.

At 90 % no leases are given; at 100 % groups wait with their producers and checkpoints with the trainer, until there is room.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.runs import eventually

from .memory import memory_bounded
from .mounts import tmpfs
from .run_under_test import RECOVERY_S, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

DISK_MEGABYTES = 48


class Filler:
    """A file that takes room on a disk."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._file = disk / "filler"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def fill(self, share: float) -> None:
        """So that `share` of the disk is used."""
        usage = shutil.disk_usage(self._disk)
        size = int(usage.total * share) - usage.used
        with self._file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def fill_to_the_brim(self) -> None:
        """And whatever is given free meanwhile is taken too."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._take_everything, daemon=True)
        self._thread.start()
        eventually(lambda: shutil.disk_usage(self._disk).free == 0, 10)

    def remove(self) -> float:
        """Returns when there was room again (Unix time)."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._file.unlink()
        return time.time()

    def _take_everything(self) -> None:
        with self._file.open("ab", buffering=0) as file:
            while not self._ended.is_set():
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    time.sleep(0.01)


def stands_still(run: Run) -> bool:
    """Return whether no group is acknowledged and no step taken for two seconds."""
    before = len(run.acks), run.step
    time.sleep(2)
    return (len(run.acks), run.step) == before


def test_a_disk_that_runs_full_again_and_again(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    barrier = tmp_path / "checkpoints.wait"
    with tmpfs(tmp_path / "disk", DISK_MEGABYTES) as disk:
        trained = {"max_steps": 60, "save_steps": 5, "save_total_limit": 2}
        run = make_run(run_dir=str(disk / "run"), trainer=trained)
        producer = run.producer()
        trainer = run.trainer(module="tests.faults.waiting_trainer", CHECKPOINTS_WAIT=str(barrier))
        filler = Filler(disk)
        run.wait_for_step(3)

        filler.fill(0.93)
        trainer.wait_for(r"disk of run_dir is 9\d% full: no leases until there is room")
        eventually(lambda: stands_still(run), 60)  # what was leased before comes in and is trained
        assert trainer.process.poll() is None
        assert run.step < trained["max_steps"], "no leases, no groups, no steps"
        run.recovers(filler.remove())
        trainer.wait_for("leases are given again")

        with memory_bounded(64, trainer.process.pid, producer.process.pid):
            filler.fill_to_the_brim()
            trainer.wait_for(r"journal.sqlite is full; make room.*; [1-9]\d* groups wait in memory")
            time.sleep(2)
            assert trainer.process.poll() is None
            run.recovers(filler.remove())

            barrier.touch()
            eventually(barrier.with_suffix(".reached").exists, 60)
            filler.fill_to_the_brim()
            committed = sorted(run.config.checkpoints_dir.glob("checkpoint-*"))
            barrier.unlink()
            trainer.wait_for(r"waiting for room for a checkpoint \(\d+ s\): the disk of run_dir is full", 20)
            assert sorted(run.config.checkpoints_dir.glob("checkpoint-*")) == committed
            step = run.step
            since = filler.remove()
            run.recovers(since)
            eventually(lambda: run.step > step, since + RECOVERY_S - time.time())

        run.finish(trainer, producer)
        assert len(sorted(run.config.checkpoints_dir.glob("checkpoint-*/pipeline_state.json"))) == 2
