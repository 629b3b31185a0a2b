"""Power cuts: the disk holds what was brought to it, and all that was only in memory is gone.

Guarantee under test: an acknowledged group is still there, a committed checkpoint is whole, and one that was not committed
does not count. The control runs show that the tests can fail: a journal that does not wait for the disk does lose groups.

Once with a real file system: ext4 in a file, written through the page cache, and copied while its writer stands still. And
once, where mounting is not allowed too, with a page cache made of Python (`tests.faults.volatile_disk`).
"""

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from consumer.learn import checkpoints as checkpoints
from protocol.errors import JournalError
from replay.journal.reader import JournalReader
from replay.journal.writer import Journal

from .journal_writer import KINDS, PAYLOAD, made_up_entry
from .mounts import make_ext4, mounted_image
from .volatile_disk import VolatileDisk

CUTS = int(os.environ.get("SLIPSTREAM_POWER_CUTS", "6"))
IMAGE_MEGABYTES = 96

pytestmark = pytest.mark.timeout(120)


class Writer:
    """The writing process, and what it said is safe."""

    def __init__(self, folder: Path, mode: str, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.journal_writer", str(folder), mode, str(seed)], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self._pipe = self.process.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._text = b""

    def wait_for_checkpoints(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while self._read().count(b"checkpoint") < count:
            assert self.process.poll() is None, "the writer ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Every thread of it stands still, also one that was in the middle of a write to the disk."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 30
            while psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def safe(self, kind: str) -> list[str]:
        """What it reported until now."""
        lines = self._read().decode().split("\n")[:-1]
        return [line.partition(" ")[2] for line in lines if line.startswith(kind)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> bytes:
        while True:
            try:
                data = os.read(self._pipe, 2**16)
            except BlockingIOError:
                return self._text
            if not data:
                return self._text
            self._text += data


def copy_of(image: Path, target: Path) -> None:
    """A copy as of one moment: once more if the kernel wrote to the image meanwhile."""
    for _ in range(20):
        subprocess.run(["cp", "--sparse=always", str(image), str(target)], check=True)
        if subprocess.run(["cmp", "-s", str(image), str(target)], check=False).returncode == 0:
            return
    raise AssertionError("the image never stands still")


def found_group_ids(journal_file: Path) -> set[str]:
    """What a trainer that starts there finds; every body fits its row."""
    with closing(Journal(journal_file)):
        pass
    with closing(JournalReader(journal_file)) as reader:
        assert reader.database_problems() == []
        rows = list(reader.rows())
        assert len(reader.frames([row.lease_id for row in rows])) == len(rows)
        return {row.lease_id for row in rows}


def committed_steps(folder: Path) -> set[int]:
    """Of the checkpoints that count; each must be whole."""
    steps = set()
    for state_file in folder.glob("checkpoint-*/pipeline_state.json"):
        state = json.loads(state_file.read_text())
        payload = (state_file.parent / PAYLOAD).read_bytes()
        assert hashlib.sha256(payload).hexdigest() == state["sha256"], f"{state_file.parent} is half a checkpoint"
        steps.add(state["step"])
    newest = checkpoints.latest(folder)
    assert newest is not None
    assert newest.step == max(steps)
    return steps


def cut_repeatedly(folder: Path, mode: str, cuts: int, seed: int) -> tuple[int, int, int]:
    """Returns acknowledged groups, lost ones, and checkpoints, summed over the cuts."""
    rng = random.Random(seed)
    image, copy = folder / "disk.img", folder / "survived.img"
    make_ext4(image, IMAGE_MEGABYTES)
    acknowledged = lost = num_checkpoints = 0
    with mounted_image(image, folder / "disk") as disk:
        writer = Writer(disk / "run", mode, seed)
        try:
            for number in range(1, cuts + 1):
                writer.wait_for_checkpoints(number)  # however slow the disk is
                time.sleep(rng.uniform(0.05, 0.6))
                with writer.stopped():
                    groups, steps = writer.safe("group"), {int(step) for step in writer.safe("checkpoint")}
                    copy_of(image, copy)
                with mounted_image(copy, folder / "survived") as survived:
                    found = found_group_ids(survived / "run" / "journal.sqlite")
                    counting = committed_steps(survived / "run" / "checkpoints")
                acknowledged += len(groups)
                lost += len(set(groups) - found)
                num_checkpoints += len(steps)
                assert max(counting) >= max(steps), "a committed checkpoint is gone"
                assert max(counting) <= max(steps) + 1
        finally:
            writer.close()
    return acknowledged, lost, num_checkpoints


@pytest.mark.integration
def test_no_acknowledged_group_and_no_checkpoint_is_lost(tmp_path: Path) -> None:
    acknowledged, lost, num_checkpoints = cut_repeatedly(tmp_path, "full", CUTS, seed=1)
    print(f"{CUTS} cuts: {lost} of {acknowledged} acknowledged groups lost, {num_checkpoints} checkpoints whole")
    assert lost == 0
    assert acknowledged > 20 * CUTS
    assert num_checkpoints > CUTS


@pytest.mark.integration
def test_a_journal_that_does_not_wait_for_the_disk_loses_groups(tmp_path: Path) -> None:
    acknowledged, lost, _ = cut_repeatedly(tmp_path, "normal", max(2, CUTS // 3), seed=2)
    print(f"{max(2, CUTS // 3)} cuts: {lost} of {acknowledged} acknowledged groups lost")
    assert lost > 0


def append_for_ever(journal: Journal, rng: random.Random, acknowledged: set[str]) -> None:
    for number in itertools.count(step=8):
        entries = [made_up_entry(number + i, rng) for i in range(rng.choice((1, 2, 4, 8)))]
        journal.append(entries)
        acknowledged |= {entry.lease_id for entry in entries}


def cut_in_memory(folder: Path, mode: str, seed: int) -> tuple[int, int]:
    """The life of a journal until the power fails in the middle of a commit; returns acknowledged and lost groups."""
    rng = random.Random(seed)
    acknowledged: set[str] = set()
    with VolatileDisk(operations=rng.randint(100, 2500)) as disk:
        journal = KINDS[mode](folder / "before" / "journal.sqlite")
        with pytest.raises(JournalError, match="the power is gone"):
            append_for_ever(journal, rng, acknowledged)
        disk.survivors(folder / "after", rng)
        journal.close()  # no further word with a disk that failed
    return len(acknowledged), len(acknowledged - found_group_ids(folder / "after" / "journal.sqlite"))


@pytest.mark.parametrize(("mode", "loses"), [("full", False), ("normal", True)])
def test_the_same_with_a_page_cache_that_is_lost(tmp_path: Path, mode: str, loses: bool) -> None:
    total = total_lost = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        acknowledged, lost = cut_in_memory(folder, mode, seed)
        total += acknowledged
        total_lost += lost
    print(f"20 cuts: {total_lost} of {total} acknowledged groups lost")
    assert (total_lost > 0) == loses
    assert total > 1000
