"""The end of a step is in the journal before anybody hears of its policy; old groups go when no checkpoint needs them."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from consumer.app.live_run import LiveRun
from consumer.app.run import Liveness
from consumer.app.setup import RunStart
from consumer.learn import checkpoints as checkpoints
from consumer.link.commit_queue import RolloutStorage
from consumer.link.policy_store import PublishedPolicy
from consumer.waiting import StopRequested, ThreadErrors, WaitPolicy
from protocol.config.learning import ReplaySection
from protocol.errors import JournalError, RankLostError
from replay.journal.reader import JournalReader
from replay.journal.retention import DiskGuard
from replay.journal.schema import MicroBatchPlan, RecordedBatch
from replay.replay_table import ReplayTable
from tests.unit.consumer.builders import Clock, fill, live_buffer
from tests.unit.consumer.snapshots import snapshot
from tests.unit.replay.builders import FillableJournal, replay_table

ADAPTER_DIGEST = hashlib.sha256(b"adapter").hexdigest()


class Announcements:
    """The intake, and what the disk held whenever a policy was announced."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self.heard: list[tuple[int, bytes, str, list[tuple[int, int, str]]]] = []

    def publish(self, policy: PublishedPolicy) -> None:
        with closing(JournalReader(self._journal)) as reader:
            on_disk = [(row.version, row.step, row.digest) for row in reader.policies()]
        self.heard.append((policy.version, bytes(policy.data), policy.digest, on_disk))
        policy.release()

    def describe(self) -> str:
        return "1 producer(s)"


class Run:
    """A pipeline and everything around it."""

    def __init__(
        self,
        folder: Path,
        journal: FillableJournal,
        disk: DiskGuard,
        clock: Clock,
        replay: ReplayTable | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.journal, self.clock = folder, journal, clock
        self.replay = live_buffer(journal, max_staleness=9, replay=replay)
        self.intake = Announcements(journal.path)
        self.said: list[str] = []
        self.room_at = 0.0
        self.stop_at = float("inf")
        self.feed = SimpleNamespace(last=None)
        self.stopped, self.health, unused = False, MagicMock(), cast("Any", None)
        config = SimpleNamespace(checkpoints_dir=folder, replay=ReplaySection(**({"keep_bytes": 0} | settings)))
        self.heartbeat = Liveness(self.health, lambda: self.stopped, ThreadErrors())
        self.run = LiveRun(
            cast("Any", SimpleNamespace(config=config)),
            RunStart("run"),
            cast("Any", self.feed),
            WaitPolicy(check=self.check, say=self.said.append, stall_timeout_s=60.0),
            unused,
            RolloutStorage(self.replay, journal, disk),
            cast("Any", self.intake),
            self.heartbeat,
        )

    def check(self) -> None:
        if self.clock.now >= self.stop_at:
            raise StopRequested
        if self.clock.now >= self.room_at:
            self.journal.full = False

    def step(self, number: int) -> list[str]:
        """Trains two groups; returns their ids."""
        fill(self.replay)
        batch = self.replay.next_batch(0.0)
        assert batch is not None
        self.run.submit(number, number, snapshot(b"adapter"))
        return [group.lease_id for group in batch.groups]

    def checkpoint(self, step: int) -> None:
        staged = checkpoints.staging(self.folder) / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        checkpoints.commit(staged, self.run.state() | {"step": step, "run_id": "run"})

    def steps_in_journal(self) -> list[int]:
        return [step for (step,) in self.journal.query("SELECT DISTINCT step FROM groups ORDER BY step")]


Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path, journal: FillableJournal, disk: DiskGuard, clock: Clock) -> Make:
    return functools.partial(Run, tmp_path / "checkpoints", journal, disk, clock)


@pytest.fixture
def run(make: Make) -> Iterator[Run]:
    made = make()
    yield made
    made.run.close()


def test_the_try_of_a_batch_is_taken_back_once_and_when_there_is_room(run: Run) -> None:
    def tries() -> set[int]:
        return {count for (count,) in run.journal.query("SELECT tries FROM groups")}

    ids = fill(run.replay)
    run.feed.last = run.replay.next_batch(0.0)
    run.journal.claim(RecordedBatch(1, 1, ids, 2))  # the same batch, after a crash
    assert tries() == {2}
    run.journal.full = True
    run.run.undo_try()
    run.journal.full = False
    assert tries() == {2}
    for _ in range(2):
        run.run.undo_try()
        assert tries() == {1}, "the first try ended in a crash"


def test_a_policy_is_in_the_journal_when_it_is_announced(run: Run) -> None:
    run.run.submit(0, 0, snapshot(b"first"))
    run.run.submit(3, 1, snapshot(b"second"))
    run.run.flush()
    first, second = (hashlib.sha256(data).hexdigest() for data in (b"first", b"second"))
    assert run.intake.heard == [
        (0, b"first", first, [(0, 0, first)]),
        (1, b"second", second, [(0, 0, first), (1, 3, second)]),
    ]


def test_a_step_without_a_policy_ends_too(run: Run) -> None:
    fill(run.replay)
    assert run.replay.next_batch(0.0) is not None
    assert run.journal.query("SELECT tries FROM groups") == [(1,), (1,)]
    run.run.end_step(1, MicroBatchPlan(1, 64, None))
    assert run.journal.query("SELECT tries FROM groups") == [(0,), (0,)]
    assert run.intake.heard == []
    assert run.journal.newest_version == -1


def test_on_a_full_disk_the_end_of_a_step_is_waited_for_and_then_announced(run: Run, tmp_path: Path) -> None:
    run.journal.full, run.room_at = True, 1012.0
    run.run.end_step(1, MicroBatchPlan(1, 64, None))
    run.run.submit(1, 1, snapshot(b"adapter"))
    run.run.flush()
    assert run.clock.now == 1012.25
    assert run.journal.refused == 49, "four times a second"
    assert run.said == ["waiting for room on the disk of run_dir (10 s): 1 producer(s)"]
    assert run.intake.heard == [(1, b"adapter", ADAPTER_DIGEST, [(1, 1, ADAPTER_DIGEST)])]
    assert not (tmp_path / "journal.reserve").exists(), "the reserve was given up for it"


@pytest.mark.parametrize("write", ["end_step", "note_policy"])
def test_a_journal_that_is_damaged_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    def damaged(*_: Any) -> None:
        raise JournalError("damaged")

    monkeypatch.setattr(run.journal, write, damaged)

    def publish() -> None:
        run.run.end_step(1, MicroBatchPlan(1, 64, None))
        run.run.submit(1, 1, snapshot(b"adapter"))
        run.run.flush()

    with pytest.raises(JournalError, match="damaged"):
        publish()
    assert run.intake.heard == []


def test_groups_go_when_the_oldest_kept_checkpoint_does_not_need_them(run: Run) -> None:
    for number in (1, 2, 3, 4):
        run.step(number)
        if number % 2 == 0:
            run.checkpoint(number)
    run.run.checkpointed()
    assert run.steps_in_journal() == [3, 4], "checkpoint-2 may still be resumed from"
    checkpoints.prune(run.folder, keep=1)
    run.run.checkpointed()
    assert run.steps_in_journal() == []


def test_groups_that_may_be_replayed_stay_until_no_kept_checkpoint_has_them(make: Make) -> None:
    run = make(replay_table(max_size=2))
    run.step(1)
    run.checkpoint(1)  # whose table has the groups of step 1; afterwards those of later steps displace them
    for number in (2, 3):
        run.step(number)
        run.checkpoint(number)
        run.run.checkpointed()
    assert run.steps_in_journal() == [1, 2, 3]
    checkpoints.prune(run.folder, keep=2)
    run.run.checkpointed()
    assert run.steps_in_journal() == [2, 3], "of a step that the oldest checkpoint holds, and still in its table"
    checkpoints.prune(run.folder, keep=1)
    run.run.checkpointed()
    assert run.steps_in_journal() == [3]


def test_groups_newer_than_the_state_of_the_checkpoint_stay(run: Run) -> None:
    run.step(1)
    run.checkpoint(1)
    run.step(2)
    state_file = run.folder / "checkpoint-1" / "pipeline_state.json"
    state = json.loads(state_file.read_text())
    assert state["journal_seq"] == 2
    state_file.write_text(json.dumps(state | {"step": 2}))  # only the rows that it knows may go
    run.run.checkpointed()
    assert run.steps_in_journal() == [2]


def test_without_a_checkpoint_nothing_goes(run: Run) -> None:
    run.step(1)
    run.run.checkpointed()
    assert run.steps_in_journal() == [1]


def test_with_keep_all_nothing_goes(make: Make) -> None:
    run = make(keep_all=True)
    run.step(1)
    run.checkpoint(1)
    run.run.checkpointed()
    assert run.steps_in_journal() == [1]


def test_what_may_be_kept_for_inspection_is_deleted_when_the_disk_has_no_room(
    make: Make, disk: DiskGuard, usage: SimpleNamespace
) -> None:
    run = make(keep_bytes=10**6)
    run.step(1)
    run.checkpoint(1)
    run.run.checkpointed()
    assert run.steps_in_journal() == [1]
    usage.free = 10
    disk.check()
    run.run.checkpointed()
    assert run.steps_in_journal() == []


def test_a_disk_too_full_to_delete_from_the_journal_is_tried_again_at_the_next_checkpoint(
    run: Run, tmp_path: Path
) -> None:
    run.step(1)
    run.checkpoint(1)
    run.journal.full = True
    run.run.checkpointed()
    assert not (tmp_path / "journal.reserve").exists()
    run.journal.full = False
    assert run.steps_in_journal() == [1]
    run.run.checkpointed()
    assert run.steps_in_journal() == []


# Which end of the process is not the fault of the batch in progress.


@pytest.fixture
def taken_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    monkeypatch.setattr(run.journal, "undo_try", steps.append)
    return steps


def test_once_a_stop_is_requested_no_try_counts(run: Run, taken_back: list[int]) -> None:
    run.stopped = True
    run.run.beat()
    assert taken_back == [], "there is no batch yet"
    assert run.run.is_stop_noted()
    run.stopped, run.feed.last = False, SimpleNamespace(last_step=4)
    run.run.beat()
    assert taken_back == []
    run.stopped = True
    assert not run.run.is_stop_noted()
    run.run.beat()
    assert run.run.is_stop_noted()
    run.feed.last = SimpleNamespace(last_step=6)  # claimed in the moment of the request
    assert not run.run.is_stop_noted()
    run.run.beat()
    assert run.run.is_stop_noted()
    assert taken_back == [4, 6]
    assert run.health.beat.call_count == 4


def test_a_lost_rank_is_told_and_its_step_is_no_try(run: Run, taken_back: list[int]) -> None:
    run.feed.last = SimpleNamespace(last_step=4)
    error = RankLostError("rank 1 ended")
    run.run.lose_rank(error)
    assert run.heartbeat.errors.first is error
    assert taken_back == [4]


def test_a_run_with_servers_ends_when_each_producer_serves_the_last_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or refuses it, or is gone, or a minute is over."""
    now, slept = [0.0], list[float]()

    def session(version: int, num_refused: int = 0) -> SimpleNamespace:
        return SimpleNamespace(heartbeat=SimpleNamespace(policy_version=version, num_refused=num_refused))

    slow = session(4)
    sessions = {b"a": session(5), b"b": session(3, 1), b"c": slow}

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += 10
        if len(slept) == 3:
            slow.heartbeat.policy_version = 5

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("consumer.app.live_run.time", clock)
    fleet = SimpleNamespace(store=SimpleNamespace(newest=SimpleNamespace(version=5)), sessions=sessions)
    stops = iter([False] * 6)
    run: Any = SimpleNamespace(
        flush=lambda: None, intake=SimpleNamespace(fleet=fleet), setup=SimpleNamespace(stop=lambda: next(stops, True))
    )
    LiveRun.await_final(run)
    assert len(slept) == 3
    slow.heartbeat.policy_version = 4
    slept.append(0.0)
    now[0] = 0.0
    LiveRun.await_final(run)
    assert len(slept) == 7, "then it was told to stop"
