"""Trainer and producer of this release at work with one of the release before, each exchanged for the other mid-run, and a
journal that the release before wrote.

The real intake and the real link, over sockets; the other side is `tests.release_before`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from consumer.checkpoints.run_facts import comparable
from consumer.training.feed import RecordedRun
from producer.interfaces import DownloadedPolicy
from producer.link.link import Link
from producer.link.mailbox import Mailbox
from producer.relays.neighbours import Neighbours
from producer.state import Counters, Workload
from protocol import __version__
from protocol.config.sections.transport import TransportSection
from protocol.transport.zeromq_client import ZmqClient
from protocol.transport.zeromq_server import ZmqServer
from protocol.wire.codec import schema_of
from protocol.wire.messages import GpuTurn, Hello, Lease, PolicyInfo
from replay.buffer import RolloutBuffer
from replay.journal.disk import DiskGuard
from replay.journal.reader import JournalReader
from tests import release_before
from tests.scripted import facts, made_up_group
from tests.unit.consumer.builders import live_buffer
from tests.unit.consumer.intake.builders import BLOB, DIGEST, SHAPE, Trainer
from tests.unit.consumer.training.test_retraining import FACTS
from tests.unit.protocol.channel_harness import PATIENCE_S
from tests.unit.replay.builders import FillableJournal, entry
from tools.journal.content import ContentReader

LIMIT = 2**20

Endpoints = tuple[str, str]


def until(condition: Callable[[], Any], *steps: Callable[[], None]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s"
        for step in steps:
            step()
        time.sleep(0.002)


class Worker:
    """A producer of this release: the real link, and an engine that answers at once."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.counters = Counters(policy_version=0, idle_s=7.5)
        self.channel = ZmqClient("new", *endpoints, LIMIT)
        self.blobs: list[bytes] = []
        self.outcome: list[BaseException | None] = []
        transport = TransportSection(heartbeat_interval_s=0.1, heartbeat_timeout_s=10.0)
        self.mailbox = Mailbox(self.channel)
        self.link = Link(
            self.mailbox,
            Hello("new", facts(), 8),
            transport,
            Neighbours("new", transport),
            self,
            self.counters,
            lambda: Workload((), 0, 0, 0.0),
        )
        self.link.start()

    def leased(self, lease: Lease) -> None:
        self.mailbox.put(made_up_group(lease, 0))

    def fetched(self, policy: PolicyInfo, downloaded: DownloadedPolicy | None) -> None: ...

    def policy_arrived(self, downloaded: DownloadedPolicy) -> None:
        self.blobs.append(downloaded.blob)

    def policy_refused(self, policy: PolicyInfo, reason: str) -> None: ...

    def ended(self, error: BaseException | None) -> None:
        self.outcome.append(error)

    def run_began(self, policy: PolicyInfo) -> None: ...

    def session_began(self, policy: PolicyInfo) -> None: ...

    def abandoned(self, lease_id: str) -> None: ...

    def evaluates(self, policy: PolicyInfo | None) -> None: ...

    def turn(self, turn: GpuTurn | None) -> None:
        assert turn is None, "nobody shares a GPU"

    def outbox_full(self, full: bool) -> None: ...

    def close(self) -> None:
        self.link.stop(0.0)
        self.link.join(10.0)
        assert not self.link.is_alive()


class Site:
    """Where the processes of a run meet."""

    def __init__(self, folder: Path, journal: FillableJournal, disk: DiskGuard, stack: ExitStack) -> None:
        self.endpoints = (f"ipc://{folder}/c", f"ipc://{folder}/b")
        self.journal = journal
        self.disk = disk
        self.stack = stack

    def trainer(self, replay: RolloutBuffer | None = None, **options: Any) -> Trainer:
        replay = replay or live_buffer(self.journal, groups_per_step=4)
        made = Trainer(
            self.journal, self.disk, ZmqServer(*self.endpoints, LIMIT), replay=replay, heartbeat_s=0.1, **options
        )
        made.intake.start()
        self.stack.callback(made.intake.stop, "stopping", 0.0)
        return made

    def worker(self) -> Worker:
        return self.stack.enter_context(closing(Worker(self.endpoints)))

    def old_producer(self, **facts: Any) -> release_before.Producer:
        return self.stack.enter_context(closing(release_before.Producer("old", *self.endpoints, **facts)))

    def old_trainer(self) -> release_before.Trainer:
        made = release_before.Trainer(*self.endpoints, digest=DIGEST, blob=BLOB)
        return self.stack.enter_context(closing(made))

    def frames(self) -> list[bytes]:
        with closing(JournalReader(self.journal.path)) as reader:
            return reader.frames(row.group_id for row in reader.rows())


@pytest.fixture
def site(short_dir: Path, journal: FillableJournal, disk: DiskGuard) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(short_dir, journal, disk, stack)


def test_a_producer_of_the_release_before_works_for_this_trainer(site: Site) -> None:
    """Nothing reaches it in schema 2, which would end it: neither what answers it, nor what is said unasked."""
    trainer, old = site.trainer(), site.old_producer()
    until(lambda: len(old.all("ack")) == 4 and old.blob == BLOB, old.step)
    old.beat()
    until(lambda: old.all("policy"), old.step)
    assert [ack["outcome"] for ack in old.all("ack")] == ["accepted"] * 4
    [member] = trainer.intake.fleet.sessions.values()
    assert (member.name, member.release, member.heartbeat.idle_s) == ("old", "", 0.0)
    assert [release_before.decode(frame)["type"] for frame in site.frames()] == ["group"] * 4

    trainer.publish(1, b"another", "c" * 64)
    until(lambda: old.blob == b"another", old.step)
    stopping = threading.Thread(target=trainer.intake.stop, args=("finished",))
    stopping.start()
    until(lambda: old.all("bye"), old.step)
    stopping.join(10.0)
    assert old.all("bye") == [{"type": "bye", "reason": "finished"}]


def test_a_producer_of_the_release_before_reads_why_it_is_refused(site: Site) -> None:
    trainer = site.trainer()
    old = site.old_producer(dtype="bfloat16")
    until(lambda: old.all("reject"), old.step)
    assert old.all("reject")[0]["problems"] == [
        "the engine runs in bfloat16, the trainer in float32: set the same model.dtype"
    ]
    assert len(trainer.intake.fleet.sessions) == 0


def test_this_producer_works_for_a_trainer_of_the_release_before(site: Site) -> None:
    old, new = site.old_trainer(), site.worker()
    until(lambda: len(old.all("group")) >= 3 and new.blobs and old.all("heartbeat"), old.step)
    assert old.refused == ["peer speaks protocol schema 2, this process speaks 1"], "one greeting, and no more"
    assert new.blobs == [BLOB]
    assert (new.channel.schema_version, new.outcome) == (1, [])


def test_a_trainer_of_the_release_before_that_refuses_the_producer_itself_ends_it(site: Site) -> None:
    old, new = site.old_trainer(), site.worker()
    until(lambda: old.refused, old.step)
    [[peer, second_greeting]] = old.sockets.arrived(PATIENCE_S)
    assert release_before.decode(second_greeting)["producer"] == "new"
    old.say(peer, type="reject", problems=["another base model: give both the same"])
    until(lambda: new.outcome)
    assert "another base model" in str(new.outcome[0])


def test_the_trainer_is_upgraded_under_a_producer_of_this_release(site: Site) -> None:
    """It moves up to schema 2, and what the old trainer did not acknowledge any more the new one answers."""
    with closing(site.old_trainer()) as old:
        new = site.worker()
        until(lambda: len(old.all("group")) >= 2, old.step)
    trainer = site.trainer()
    until(
        lambda: (
            trainer.replay.totals["accepted"] == 4
            and next(iter(trainer.intake.fleet.sessions.values())).heartbeat.idle_s
        )
    )
    [member] = trainer.intake.fleet.sessions.values()
    assert (member.release, member.heartbeat.idle_s) == (__version__, 7.5)
    assert (new.channel.schema_version, new.outcome) == (2, [])
    assert trainer.replay.totals["bad_frames"] == 0


def test_a_trainer_killed_and_downgraded_within_one_connection(site: Site) -> None:
    """The producer does not notice the exchange; the old trainer refuses all that it goes on sending."""
    trainer, new = site.trainer(), site.worker()
    until(lambda: trainer.replay.totals["accepted"] == 4)
    trainer.intake.fleet.sessions.clear()  # so that nobody is told goodbye
    trainer.intake.stop("stopping")
    old = site.old_trainer()
    until(lambda: len(old.all("group")) >= 2, old.step)
    assert len(old.refused) >= 2, "what it sent within the old connection, and the greeting of the new one"
    assert (new.channel.schema_version, new.outcome) == (1, [])


def test_the_trainer_is_upgraded_under_a_producer_of_the_release_before(site: Site) -> None:
    with closing(site.old_trainer()) as first:
        old = site.old_producer()
        until(lambda: first.all("group"), first.step, old.step)
    trainer = site.trainer()
    until(lambda: trainer.replay.totals["accepted"] == 4, old.beat, old.step)
    assert old.all("bye")[0]["reason"] == "unknown_session"


def test_producers_are_upgraded_one_by_one(site: Site) -> None:
    """Both releases at once; the three leases of the one that leaves go to the other."""
    trainer, old = site.trainer(), site.old_producer()
    old.max_answers = 1
    until(lambda: len(old.all("ack")) == 1, old.step)
    new = site.worker()
    until(lambda: len(trainer.intake.fleet.sessions) == 2)
    old.say(type="bye", reason="stopping")
    until(lambda: trainer.replay.totals["accepted"] == 4)
    assert [member.release for member in trainer.intake.fleet.sessions.values()] == [__version__]
    assert {schema_of(frame) for frame in site.frames()} == {1}
    assert all(SHAPE.load(frame) for frame in site.frames())
    assert new.outcome == []


def test_a_journal_of_the_release_before_goes_on_is_read_and_trained_again(
    journal: FillableJournal, tmp_path: Path
) -> None:
    facts_before = FACTS | {"wire_schema": "1", "groups_per_step": "4", "vocab_size": "12"}
    journal.note_facts(facts_before)
    ids = [f"0-{number}-0-1-s" for number in range(4)]
    journal.append(
        entry(number, frame=release_before.encode(**release_before.group(group_id, 0)))
        for number, group_id in enumerate(ids)
    )
    resumed = live_buffer(journal, groups_per_step=4)
    resumed.restore(None, step=0, shape=SHAPE, comparable=comparable(facts_before, facts_before, journal.path))
    batch = resumed.next_batch(0.0)
    assert batch is not None
    assert [group.group_id for group in batch.groups] == ids
    journal.end_step(1)

    with closing(JournalReader(journal.path)) as reader:
        contents = [ContentReader(reader).read(row) for row in reader.rows()]
        assert [content.message.lease_id for content in contents if content is not None] == ids
    with closing(RecordedRun(tmp_path)) as recorded:
        [again] = recorded.batches(1, SHAPE)
    assert [group.group_id for group in again.groups] == ids
    assert [group.rewards.tolist() for group in again.groups] == [[[0.0], [1.0], [0.0], [1.0]]] * 4
