"""The I/O thread against peers of every kind: each delivery is answered once, after it is on the disk, and nothing a peer
sends ends the thread.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from consumer import intake as intake_module
from consumer.arrivals import COMMIT_ROWS
from consumer.intake import Intake
from consumer.leasing import LeaseDesk
from protocol.codec import encode
from protocol.errors import DatasetError, JournalError
from protocol.handshake import TrainerNeeds
from protocol.loopback import LoopbackClient, LoopbackServer
from protocol.messages import (
    Ack,
    BlobChunk,
    BlobMissing,
    BlobRequest,
    Bye,
    Group,
    Heartbeat,
    Hello,
    Lease,
    Nack,
    Policy,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
    Reject,
    Sampling,
    Welcome,
)
from protocol.shared_memory import NO_MEMORY, SharedMemory, shared_memory
from protocol.throttle import NUM_SHOWN_AT_ONCE, THEN_EVERY_S
from protocol.zmq_channel import ZmqClient, ZmqServer
from replay.buffer import RolloutBuffer
from replay.disk import DiskGuard
from replay.groups import GroupShape
from replay.journal_reader import JournalReader
from tests.scripted import facts, made_up_group

from .builders import FillableJournal, live_buffer

NEEDS = TrainerNeeds("0" * 64, "1" * 64, "float32", 8, 3, 4, ("reward",))
SAMPLING = Sampling(num_generations=4, max_completion_length=4, temperature=1.0)
BLOB = bytes(range(250)) * 10
DIGEST = hashlib.sha256(BLOB).hexdigest()


class Prompts:
    """Prompt `n` is "n"; some are bad."""

    def __init__(self, bad: Callable[[int], bool] = lambda prompt_id: False, columns: Any = None) -> None:
        self.bad = bad
        self.columns = columns or {"answer": 1}

    def __getitem__(self, prompt_id: int) -> tuple[str, dict[str, Any]]:
        if self.bad(prompt_id):
            raise DatasetError(f"row {prompt_id} has no usable prompt")
        return str(prompt_id), self.columns


SHAPE = GroupShape(num_generations=4, num_rewards=1, max_completion_length=4, vocab_size=12)


class Trainer:
    """An intake whose ticks and clock are the test's, with version 0 published."""

    def __init__(
        self,
        journal: FillableJournal,
        disk: DiskGuard,
        channel: Any = None,
        prompts: Any = None,
        replay: RolloutBuffer | None = None,
        memory: SharedMemory = NO_MEMORY,
        **budget: int,
    ) -> None:
        self.channel = channel or LoopbackServer()
        self.replay = replay or live_buffer(journal, **budget)
        self.now = 100.0
        self.intake = Intake(
            self.channel,
            self.replay,
            journal,
            disk,
            LeaseDesk(self.channel, self.replay, prompts or Prompts(), disk, sampling=SAMPLING, timeout_s=60.0),
            needs=NEEDS,
            shape=SHAPE,
            run_id="run",
            session="session",
            heartbeat_interval_s=1.0,
            heartbeat_timeout_s=6.0,
            keep_blobs=2,
            memory=memory,
            clock=lambda: self.now,
        )
        self.intake.publish(0, BLOB, DIGEST)

    def tick(self) -> None:
        self.intake.tick(0.0)

    def producer(self, name: str = "p", *, capacity: int = 64, held: list[str] | None = None) -> "Producer":
        client = Producer(self, self.channel.connect(name), name)
        client.hello(capacity, held)
        return client


class Producer:
    def __init__(self, trainer: Trainer, channel: LoopbackClient, name: str) -> None:
        self.trainer = trainer
        self.channel = channel
        self.name = name
        self.inbox: list[Any] = []

    def hello(self, capacity: int = 64, held: list[str] | None = None, **changes: Any) -> list[Any]:
        return self.say(Hello(self.name, facts(**changes), capacity, held or []))

    def say(self, *messages: Any) -> list[Any]:
        """Sends, lets the trainer tick, and returns everything that came back."""
        for message in messages:
            assert self.channel.send(message)
        self.trainer.tick()
        return self.hear()

    def hear(self) -> list[Any]:
        arrived = self.channel.poll(0.0)
        self.inbox += arrived
        return arrived

    def all(self, kind: type) -> list[Any]:
        self.hear()
        return [message for message in self.inbox if isinstance(message, kind)]

    @property
    def leases(self) -> list[Lease]:
        return self.all(Lease)

    def beat(self, tokens: int = 0, version: int = 0, capacity: int = 64, held: list[str] | None = None) -> list[Any]:
        """By default it names all leases that it ever got."""
        names = [lease.lease_id for lease in self.leases] if held is None else held
        return self.say(Heartbeat(version, capacity, names, tokens, 0.0))


Start = Callable[..., Trainer]


@pytest.fixture
def start(journal: FillableJournal, disk: DiskGuard) -> Start:
    """A trainer process; the journal outlives it."""

    def trainer(*arguments: Any, **options: Any) -> Trainer:
        return Trainer(journal, disk, *arguments, **options)

    return trainer


def only(messages: list[Any], kind: type) -> Any:
    [message] = [message for message in messages if isinstance(message, kind)]
    return message


def answer(lease: Lease, version: int = 0, **changes: Any) -> Group:
    return made_up_group(lease, version, **changes)


def renamed(group: Group, **changes: Any) -> Group:
    return Group(**({name: getattr(group, name) for name in group.__struct_fields__} | changes))


# The handshake.


def test_a_producer_that_fits_is_welcomed_and_leased_to(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    assert producer.all(Welcome) == [Welcome("run", "session", PolicyInfo(0, DIGEST, len(BLOB)), 1.0)]
    assert [lease.lease_id for lease in producer.leases] == ["0-0-0-1-s", "0-1-0-1-s"]
    assert producer.leases[0] == Lease("0-0-0-1-s", 0, 1, "0", {"answer": 1}, SAMPLING, 0, 60.0)
    assert trainer.intake.num_producers == 1


def test_a_producer_that_does_not_fit_gets_every_reason_with_its_fix(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    stranger = Producer(trainer, trainer.channel.connect("stranger"), "stranger")
    reject = only(stranger.hello(base_model_digest="a" * 64, max_loras=1), Reject)
    assert reject.problems == [
        "the producer serves another base model (aaaaaaaaaaaa) than the trainer trains (000000000000): give both the "
        "same model.path and model.revision",
        "the engine has 1 LoRA slots, max_staleness needs 3: restart the producer with the trainer's "
        "pipeline.max_staleness",
    ]
    assert trainer.intake.num_producers == 0
    assert stranger.leases == []
    assert "refused producer stranger: the producer serves another base model" in caplog.text


def test_another_release_is_told_so_and_counted(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("old")
    client.send_frame(encode(Hello("old", facts(), 1), schema_version=7))
    trainer.tick()
    [reject] = client.poll(0.0)
    assert reject == Reject(
        ["peer speaks protocol schema 7, this process speaks 1 and 2: install the same release on both sides"]
    )
    assert trainer.replay.counts["bad_frames"] == 1


def test_a_peer_that_never_said_hello_is_asked_to(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("ghost")
    for message in (Heartbeat(0, 1, [], 0, 0.0), Nack("s-1", "returned"), Group("s-1", 0, *[b""] * 6, 0.0, 0.0)):
        client.send(message)
        trainer.tick()
        assert client.poll(0.0) == [Bye("unknown_session")]
    client.send(Bye("stopping"))
    trainer.tick()
    assert client.poll(0.0) == [], "two that say goodbye to each other would never end"
    assert trainer.replay.counts["unknown_lease"] == 0


# Leases.


def test_two_producers_share_the_leases_by_their_room(start: Start) -> None:
    trainer = start(groups_per_step=9)
    small, large = trainer.producer("small", capacity=0), trainer.producer("large", capacity=0)
    small.channel.send(Heartbeat(0, 3, [], 0, 0.0))
    large.channel.send(Heartbeat(0, 5, [], 0, 0.0))
    trainer.tick()
    assert (len(small.leases), len(large.leases)) == (3, 5)
    assert len({lease.prompt_id for lease in small.leases + large.leases}) == 8


def test_a_full_producer_gets_one_lease_for_each_answer(start: Start) -> None:
    trainer = start(groups_per_step=9)
    producer = trainer.producer(capacity=2)
    assert len(producer.leases) == 2
    producer.say(answer(producer.leases[0]))
    assert len(producer.leases) == 3
    producer.say(Nack(producer.leases[1].lease_id, "generation_failed", "out of memory"))
    assert len(producer.leases) == 4


def test_leases_wait_for_the_staleness_budget(start: Start) -> None:
    trainer = start(groups_per_step=2, max_staleness=1)
    producer = trainer.producer()
    assert len(producer.leases) == 4
    producer.say(*[answer(lease) for lease in producer.leases])
    assert len(producer.leases) == 4
    assert trainer.replay.next_batch(0.0) is not None
    trainer.intake.publish(1, b"next", "a" * 64)
    trainer.tick()
    assert [lease.policy_floor for lease in producer.leases[4:]] == [1, 1]


def test_a_new_policy_is_announced_once_and_with_every_acknowledgement(start: Start) -> None:
    trainer = start(groups_per_step=4)
    producer = trainer.producer(capacity=4)
    producer.inbox.clear()
    trainer.intake.publish(1, b"next", "a" * 64)
    trainer.tick()
    trainer.tick()
    new = PolicyInfo(1, "a" * 64, 4)
    assert producer.hear() == [Policy(new)]
    assert producer.beat(capacity=4) == [Policy(new)]
    assert only(producer.say(answer(made_lease("0-0-0-1-s"))), Ack) == Ack("0-0-0-1-s", "accepted", new)


def made_lease(lease_id: str) -> Lease:
    return Lease(lease_id, 0, 1, "0", {}, SAMPLING, 0, 60.0)


def test_an_expired_lease_goes_to_somebody_else(start: Start) -> None:
    trainer = start(groups_per_step=1)
    slow = trainer.producer("slow", capacity=1)
    fast = trainer.producer("fast", capacity=1)
    assert (len(slow.leases), len(fast.leases)) == (1, 0)
    for _ in range(12):
        trainer.now += 5
        slow.beat(capacity=0)  # alive, and wants nothing more
        fast.beat(capacity=1)
    assert trainer.replay.counts["failed_expired"] == 1
    assert [lease.prompt_id for lease in fast.leases] == [slow.leases[0].prompt_id] == [0]
    assert only(slow.say(answer(slow.leases[0])), Ack).outcome == "accepted"
    assert only(fast.say(answer(fast.leases[0])), Ack).outcome == "duplicate"


def test_leases_of_a_trainer_that_is_gone_take_no_room(start: Start) -> None:
    trainer = start(groups_per_step=4)
    producer = trainer.producer(capacity=2, held=["dead-1", "dead-2"])
    assert len(producer.leases) == 2


def test_a_lease_that_two_heartbeats_do_not_name_goes_out_again(start: Start) -> None:
    """It was lost on the way; its deadline may be an hour away."""
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=2)
    kept, lost = (lease.lease_id for lease in producer.leases)
    producer.beat(capacity=2, held=[kept])
    assert len(producer.leases) == 2, "a heartbeat may cross a lease that is on its way"
    producer.beat(capacity=2, held=[kept, lost])
    producer.beat(capacity=2, held=[kept])
    assert len(producer.leases) == 2, "not two in a row"
    producer.beat(capacity=2, held=[kept])
    assert [lease.prompt_id for lease in producer.leases] == [0, 1, 1]
    assert trainer.replay.counts["failed_released"] == 1


def test_bad_prompts_are_skipped_and_counted_and_the_others_go_out(start: Start) -> None:
    trainer = start(prompts=Prompts(bad=lambda prompt_id: prompt_id % 2 == 0), groups_per_step=3)
    producer = trainer.producer()
    assert [lease.prompt_id for lease in producer.leases] == [1, 3, 5]
    assert trainer.replay.counts["failed_bad_prompt"] == trainer.replay.counts["dead_letters"] == 3


@pytest.fixture
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose producers do not answer a goodbye."""
    monkeypatch.setattr(intake_module, "_FAREWELL_S", 0.1)


@pytest.mark.usefixtures("short_farewell")
def test_a_column_that_cannot_travel_is_a_bad_prompt(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    prompts = Prompts()
    trainer = start(prompts=prompts)
    prompts.columns = {"image": object()}
    trainer.intake.start()  # every prompt fails, so there is no end of giving: it must still be possible to stop
    client = trainer.channel.connect("p")
    client.send(Hello("p", facts(), 8))
    deadline = time.monotonic() + 10
    while trainer.replay.counts["failed_bad_prompt"] < 30:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    trainer.intake.stop("stopping")
    assert time.monotonic() - began < 4
    assert "cannot encode Lease" in caplog.text


# Groups.


def test_every_outcome_is_acknowledged(start: Start) -> None:
    trainer = start(groups_per_step=3)
    producer = trainer.producer()
    first, dull, _ = producer.leases
    assert only(producer.say(answer(first)), Ack).outcome == "accepted"
    assert only(producer.say(answer(first)), Ack).outcome == "duplicate"
    assert only(producer.say(answer(dull, rewards=[1.0] * 4)), Ack).outcome == "no_signal"


def test_an_invalid_group_is_refused_with_the_reason_and_its_prompt_goes_out_again(start: Start) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer()
    [lease] = producer.leases
    broken = renamed(answer(lease), rewards=b"\0\0")
    assert only(producer.say(broken), Nack) == Nack(lease.lease_id, "invalid", "rewards has 2 bytes, expected 4 x 4")
    assert [(again.prompt_id, again.attempt) for again in producer.leases[1:]] == [(0, 2)]
    assert trainer.replay.counts["failed_invalid"] == 1


def test_a_version_that_was_never_published_is_invalid(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    nack = only(producer.say(answer(producer.leases[0], version=1)), Nack)
    assert (nack.reason, nack.detail) == ("invalid", "policy version 1 was never published")


def test_the_versions_of_a_group_s_tokens_are_journaled_and_none_may_be_unpublished(
    start: Start, journal: FillableJournal
) -> None:
    trainer = start()
    trainer.intake.publish(1, BLOB, DIGEST)
    producer = trainer.producer()
    first, second = (answer(lease) for lease in producer.leases[:2])

    def spanning(group: Group, newest: int) -> Group:
        versions = np.zeros(len(group.logprobs) // 4, "<i4")
        versions[-1] = newest
        return renamed(group, token_versions=versions.tobytes())

    assert only(producer.say(spanning(first, 1)), Ack).outcome == "accepted"
    nack = only(producer.say(spanning(second, 2)), Nack)
    assert (nack.reason, nack.detail) == ("invalid", "policy version 2 was never published")
    [(frame,)] = journal.query("SELECT frame FROM bodies")
    kept = SHAPE.load(frame)
    assert (kept.policy_version, kept.newest_version, kept.versions.tolist()[-2:]) == (0, 1, [0, 1])


def test_a_lease_of_another_trainer_is_unknown(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    assert only(producer.say(answer(made_lease("old-1"))), Nack) == Nack(
        "old-1", "unknown_lease", "not a lease of this run"
    )
    broken = renamed(answer(made_lease("old-2")), rewards=b"")
    assert only(producer.say(broken), Nack).reason == "invalid"
    producer.say(Nack("old-3", "reward_failed", "boom"))
    assert trainer.replay.counts["unknown_lease"] == 1, "of groups alone"
    assert trainer.replay.counts["failed_reward_failed"] == 0
    assert trainer.replay.counts["failed_invalid"] == 0


def test_an_endless_list_of_rewards_or_tokens_is_refused(start: Start) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer()
    for field in ("rewards", "completion_ids", "logprobs", "truncated", "completion_lengths"):
        [*_, lease] = producer.leases
        endless = renamed(answer(lease), **{field: b"\0" * 4_000_000})
        assert f"{field} has 4000000 bytes" in only(producer.say(endless), Nack).detail


def test_a_failure_is_logged_with_its_reason_a_few_times(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    trainer = start(groups_per_step=300)
    producer = trainer.producer(capacity=300)
    nacks = [Nack(lease.lease_id, "reward_failed", "KeyError: 'answer'") for lease in producer.leases[:251]]
    producer.say(*nacks[:250])
    trainer.now += THEN_EVERY_S
    producer.say(nacks[250])
    lines = [record.getMessage() for record in caplog.records if "KeyError" in record.getMessage()]
    assert len(lines) == NUM_SHOWN_AT_ONCE + 1 == 6
    assert lines[0] == "p could not answer a prompt: reward_failed: KeyError: 'answer'"
    assert lines[-1].endswith("(245 more of this kind were left out)")


# Durability.


class Disclosure:
    """What a second, read-only connection to the journal sees whenever an acknowledgement is sent."""

    def __init__(self, trainer: Trainer, path: Path) -> None:
        self._path = path
        self._send = trainer.channel.send
        self.seen: list[tuple[str, bool]] = []  # lease and whether its group was on the disk, for every Ack
        trainer.channel.send = self.send

    def send(self, peer: bytes, message: Any) -> bool:
        if isinstance(message, Ack):
            with closing(JournalReader(self._path)) as reader:
                self.seen.append((message.lease_id, reader.row(message.lease_id) is not None))
        return self._send(peer, message)


def test_no_group_is_acknowledged_before_it_is_in_the_journal(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=40)
    producer = trainer.producer(capacity=40)
    leases = producer.leases
    acknowledged = Disclosure(trainer, journal.path)
    producer.say(*[answer(lease, rewards=[float(i % 3)] * 3 + [0.0]) for i, lease in enumerate(leases)])
    assert acknowledged.seen == [(lease.lease_id, True) for lease in leases]
    assert {ack.outcome for ack in producer.all(Ack)} == {"accepted", "no_signal"}


def test_what_came_together_is_committed_together_but_no_more_than_32(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=80)
    producer = trainer.producer(capacity=80)
    assert COMMIT_ROWS == 32
    producer.say(*[answer(lease) for lease in producer.leases[:33]])
    assert journal.commits == [32, 1]
    producer.say(*[answer(lease) for lease in producer.leases[33:]])
    assert journal.commits == [32, 1, 32, 15]
    assert len(producer.all(Ack)) == 80


def test_no_group_waits_longer_than_5_ms_for_others(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=10)
    producer = trainer.producer(capacity=10)
    poll = trainer.channel.poll

    def slow(timeout_s: float) -> Iterator[Any]:
        for received in poll(timeout_s):
            trainer.now += 0.002  # as long as it takes to check a large group
            yield received

    trainer.channel.poll = slow
    producer.say(*[answer(lease) for lease in producer.leases])
    assert journal.commits == [4, 4, 2]


def test_on_a_full_disk_groups_wait_unacknowledged_and_are_tried_again_every_tick(
    start: Start, journal: FillableJournal, disk: DiskGuard, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(groups_per_step=3)
    producer = trainer.producer(capacity=3)
    groups = [answer(lease) for lease in producer.leases]
    reserve = journal.path.parent / "journal.reserve"
    assert reserve.exists()
    journal.full = True
    producer.say(*groups)
    assert producer.all(Ack) == []
    assert (trainer.replay.depth()["ready"], trainer.replay.depth()["leased"]) == (0, 3)
    assert not reserve.exists(), "given up, so that what is in progress can end"
    assert f"the disk of {journal.path} is full; 3 groups wait in memory, the rest with producers" in caplog.text
    producer.say(*groups[:2])  # its patience with acknowledgements is over
    refused = journal.refused
    for _ in range(3):
        trainer.tick()
    assert journal.refused == refused + 3
    journal.full = False
    trainer.tick()
    assert [(ack.lease_id, ack.outcome) for ack in producer.all(Ack)] == [
        (group.lease_id, "accepted") for group in groups
    ]
    assert journal.commits == [3]
    assert trainer.replay.counts["duplicate"] == 0
    assert (trainer.replay.depth()["ready"], trainer.replay.depth()["leased"]) == (3, 0)


def test_a_group_that_waits_for_the_disk_is_answered_where_its_producer_is_now(
    start: Start, journal: FillableJournal
) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer(capacity=1)
    [lease] = producer.leases
    journal.full = True
    producer.say(answer(lease))
    producer.channel.reset()
    producer.hello(1, [lease.lease_id])
    producer.say(answer(lease))
    journal.full = False
    trainer.tick()
    assert only(producer.all(Ack), Ack) == Ack(lease.lease_id, "accepted", PolicyInfo(0, DIGEST, 2500))


def test_no_more_than_1024_groups_wait_in_memory(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=1030)
    producer = trainer.producer(capacity=1030)
    for _ in range(4):
        trainer.tick()
    groups = [answer(lease) for lease in producer.leases]
    assert len(groups) == 1030
    journal.full = True
    producer.say(*groups)
    assert journal.refused == 2, "once for the first 32, once at the end of the tick"
    journal.full = False
    trainer.tick()
    assert len(producer.all(Ack)) == sum(journal.commits) == 1024
    producer.say(*groups[1024:])  # its producer still has them
    assert len(producer.all(Ack)) == trainer.replay.counts["accepted"] == 1030


def test_groups_that_wait_for_the_disk_are_not_lost_with_their_producer(
    start: Start, journal: FillableJournal, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=2)
    answered, open_lease = producer.leases
    journal.full = True
    producer.say(answer(answered))
    trainer.now += 7.0
    trainer.tick()
    assert "producer p left (silent for 7.0 s); 1 prompts go out again" in caplog.text
    producer.hello(0)  # as a new process, which holds nothing
    for _ in range(3):
        producer.beat(capacity=0, held=[])
    journal.full = False
    trainer.tick()
    counts = trainer.replay.counts
    assert (counts["accepted"], counts["failed_released"], counts["leased"]) == (1, 1, 2)
    assert open_lease.lease_id not in trainer.replay.leased_to("p")
    assert "knows nothing of" not in caplog.text


def test_a_group_that_comes_with_a_goodbye_is_no_lost_lease(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    trainer = start()
    producer = trainer.producer(capacity=2)
    producer.say(answer(producer.leases[0]), Bye("stopping"))
    assert trainer.replay.counts["accepted"] == 1
    assert trainer.replay.counts["failed_released"] == 1
    assert "1 prompts go out again" in caplog.text


def test_a_failure_that_the_full_disk_cannot_bury_leaves_the_lease(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer(capacity=1)
    [lease] = producer.leases
    journal.full = True
    producer.say(Nack(lease.lease_id, "prompt_too_long", "9999 tokens"))
    assert trainer.replay.depth()["leased"] == 1
    assert trainer.replay.counts["dead_letters"] == 0
    journal.full = False
    producer.say(Nack(lease.lease_id, "prompt_too_long", "9999 tokens"))
    assert trainer.replay.counts["dead_letters"] == 1


def test_an_error_of_the_journal_ends_the_thread_and_is_raised_in_the_main_thread(
    start: Start, journal: FillableJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start()
    producer = trainer.producer()

    def damaged(entries: Any) -> None:
        raise JournalError(f"{journal.path} is damaged")

    monkeypatch.setattr(journal, "append", damaged)
    trainer.intake.start()
    producer.channel.send(answer(producer.leases[0]))
    trainer.intake._thread.join(10)
    assert not trainer.intake._thread.is_alive()
    with pytest.raises(JournalError, match="is damaged") as caught:
        trainer.intake.check()
    assert caught.value.exit_code == 74
    assert producer.all(Ack) == []


# Room on the disk.


@pytest.mark.parametrize("at_the_start", [False, True])
def test_no_leases_without_room_on_the_disk_and_again_when_there_is_room(
    start: Start, usage: SimpleNamespace, disk: DiskGuard, caplog: pytest.LogCaptureFixture, at_the_start: bool
) -> None:
    caplog.set_level(logging.INFO)
    trainer = start(groups_per_step=2)
    if not at_the_start:
        trainer.tick()
    usage.used, usage.free = 950, 50
    if at_the_start:
        disk.look()  # as its constructor does
    trainer.now += 1.0
    trainer.tick()
    producer = trainer.producer(capacity=1)
    assert producer.leases == []
    trainer.now += 1.0
    trainer.tick()
    usage.used, usage.free = 500, 500
    trainer.now += 0.5
    trainer.tick()
    assert producer.leases == [], "it looks once a second"
    trainer.now += 0.5
    trainer.tick()
    assert len(producer.leases) == 1
    assert [record.getMessage() for record in caplog.records if "full" in record.getMessage()] == [
        "the disk of run_dir is 95% full: no leases until there is room (replay.max_disk_used)",
        "the disk of run_dir is 50% full: leases are given again",
    ]


def test_without_room_for_leases_groups_are_still_taken(start: Start, usage: SimpleNamespace) -> None:
    trainer = start(groups_per_step=2)
    producer = trainer.producer(capacity=2)
    usage.free = 10
    trainer.now += 1.0
    producer.say(*[answer(lease) for lease in producer.leases])
    assert [ack.outcome for ack in producer.all(Ack)] == ["accepted", "accepted"]


# Leases of a trainer process that is gone.


def next_process(start: Start, journal: FillableJournal, session: str = "t") -> Trainer:
    replay = live_buffer(journal, session=session, groups_per_step=4)
    replay.restore(None, step=0, shape=SHAPE)
    return start(replay=replay)


def test_leases_of_an_older_process_are_adopted_and_their_groups_accepted(
    start: Start, journal: FillableJournal
) -> None:
    before = start(groups_per_step=4).producer(capacity=3)
    leases = before.leases
    trainer = next_process(start, journal)
    producer = trainer.producer(capacity=3, held=[lease.lease_id for lease in leases[:2]])
    assert trainer.replay.counts["adopted"] == 2
    assert producer.all(Nack) == producer.all(Ack) == []
    assert [lease.lease_id for lease in producer.leases] == ["0-2-0-1-t"], "adopted leases take room"
    assert trainer.replay.leased_to("p") == {"0-0-0-1-s", "0-1-0-1-s", "0-2-0-1-t"}
    ack = only(producer.say(answer(leases[0])), Ack)
    assert (ack.lease_id, ack.outcome) == ("0-0-0-1-s", "accepted")
    assert journal.query("SELECT group_id FROM groups") == [("0-0-0-1-s",)]
    assert producer.leases[-1].lease_id == "0-3-0-1-t", "its room is free again"


def test_an_adopted_lease_has_the_whole_time_of_a_new_one(start: Start, journal: FillableJournal) -> None:
    [lease, *_] = start(groups_per_step=4).producer().leases
    trainer = next_process(start, journal)
    trainer.now = 5000.0
    producer = trainer.producer(capacity=0, held=[lease.lease_id])
    for _ in range(11):
        trainer.now += 5.0
        producer.beat(capacity=0, held=[lease.lease_id])
    assert trainer.replay.counts["failed_expired"] == 0
    trainer.now += 5.0
    producer.beat(capacity=0, held=[lease.lease_id])
    assert trainer.replay.counts["failed_expired"] == 1


def test_leases_that_the_older_process_answered_are_acknowledged_as_duplicates(
    start: Start, journal: FillableJournal
) -> None:
    older = start(groups_per_step=4).producer()
    answered, open_lease, *_ = older.leases
    older.say(answer(answered))  # and the acknowledgement is lost
    trainer = next_process(start, journal)
    producer = trainer.producer(capacity=0, held=[answered.lease_id, open_lease.lease_id])
    assert producer.all(Ack) == [Ack(answered.lease_id, "duplicate", PolicyInfo(0, DIGEST, len(BLOB)))]
    assert producer.all(Nack) == []
    assert isinstance(producer.inbox[0], Welcome), "before anything else"
    assert trainer.replay.leased_to("p") == {open_lease.lease_id}
    assert trainer.replay.counts["adopted"] == 1


def test_leases_that_nobody_wants_any_more_are_refused(start: Start, journal: FillableJournal) -> None:
    older = start(groups_per_step=4).producer()
    lease, *_ = older.leases
    trainer = next_process(start, journal)
    other = trainer.producer("other", capacity=1)
    assert other.leases[0].prompt_id == lease.prompt_id
    foreign = ["7-0-0-1-s", "0-5000-0-1-s", "not a lease"]
    producer = trainer.producer(capacity=0, held=[lease.lease_id, *foreign])
    words = "its prompt is not wanted any more"
    assert producer.all(Nack) == [Nack(name, "unknown_lease", words) for name in (lease.lease_id, *foreign)]
    assert trainer.replay.counts["adopted"] == 0
    assert trainer.replay.leased_to("p") == set()
    assert only(other.say(answer(other.leases[0])), Ack).outcome == "accepted"


def test_groups_of_a_version_that_only_the_journal_knows_are_accepted_and_later_ones_refused(
    start: Start, journal: FillableJournal
) -> None:
    """The last process published more than the checkpoint that this one starts from."""
    journal.end_step(3)
    journal.note_policy(3, 3, "a" * 64)
    trainer = next_process(start, journal)
    producer = trainer.producer(capacity=2)
    first, second = producer.leases
    assert only(producer.say(answer(first, version=3)), Ack).outcome == "accepted"
    nack = only(producer.say(answer(second, version=4)), Nack)
    assert (nack.reason, nack.detail) == ("invalid", "policy version 4 was never published")
    assert journal.query("SELECT policy_version FROM groups") == [(3,)]


# Presence.


def test_a_silent_producer_is_given_up_and_its_leases_go_to_the_others(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    silent, other = trainer.producer("silent", capacity=2), trainer.producer("other", capacity=2)
    assert (len(silent.leases), len(other.leases)) == (2, 0)
    trainer.now += 6.0
    other.beat()
    assert trainer.intake.num_producers == 2
    trainer.now += 0.1
    other.beat()
    assert trainer.intake.num_producers == 1
    assert [lease.prompt_id for lease in other.leases] == [0, 1]
    assert "producer silent left (silent for 6.1 s); 2 prompts go out again" in caplog.text
    assert silent.beat() == [Bye("unknown_session")]


def test_a_producer_that_says_goodbye_frees_its_leases(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    producer.say(Bye("stopping"))
    assert trainer.intake.num_producers == 0
    assert trainer.replay.counts["failed_released"] == 2
    assert trainer.intake.describe() == "no producer is connected; start one with: rl-producer --config FILE"


def test_a_producer_that_reconnects_keeps_what_it_holds(start: Start) -> None:
    trainer = start(groups_per_step=3)
    producer = trainer.producer(capacity=3)
    held, lost, finished = producer.leases
    producer.channel.reset()
    producer.inbox.clear()
    producer.hello(3, [held.lease_id, finished.lease_id])
    assert trainer.intake.num_producers == 1
    assert [(lease.prompt_id, lease.attempt) for lease in producer.leases] == [(lost.prompt_id, 2)]
    assert only(producer.say(answer(finished)), Ack).outcome == "accepted"
    assert trainer.replay.counts["failed_released"] == 1


def test_a_peer_that_changes_its_name_leaves_nothing_behind(start: Start) -> None:
    trainer = start()
    producer = trainer.producer("before")
    assert len(producer.leases) == 2
    producer.name = "after"
    producer.hello()
    assert trainer.intake.num_producers == 1
    assert trainer.replay.depth()["leased"] == 2
    assert [lease.attempt for lease in producer.leases] == [1, 1, 2, 2]


def test_a_producer_that_cannot_be_reached_is_given_up(start: Start) -> None:
    trainer = start()
    producer = trainer.producer(capacity=0)
    trainer.channel.clients.pop(producer.channel.peer)
    trainer.channel.inbox.put(producer.channel.peer, encode(Heartbeat(0, 5, [], 0, 0.0)))
    trainer.tick()
    assert trainer.intake.num_producers == 0
    assert trainer.replay.depth()["leased"] == 0


def test_tokens_are_counted_once_however_often_a_producer_comes_back(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    for tokens in (0, 100, 250):
        producer.beat(tokens)
    producer.channel.reset()
    producer.hello()
    producer.beat(300)
    veteran = trainer.producer("of-an-earlier-trainer")
    for tokens in (1_000_000, 1_000_050):
        veteran.beat(tokens)
    assert trainer.intake.tokens_generated == 350


def test_who_waits_for_whom_in_words(start: Start, usage: SimpleNamespace) -> None:
    trainer = start(groups_per_step=4)
    first, _ = trainer.producer("a", capacity=3), trainer.producer("b", capacity=0)
    held = [lease.lease_id for lease in first.leases]
    first.say(Heartbeat(0, 3, held, 0, 0.0, waiting=1, generating=2, scoring=0, unacked=5))
    first.say(answer(first.leases[0]))
    trainer.now += 1.5
    words = (
        "2 producer(s), 3 leases out, 1 groups ready, newest policy v0; a (policy v0, heard 1.5 s ago, 3 leases: "
        "1 waiting, 2 generating, 0 scoring, 5 not acknowledged); b (no heartbeat yet)"
    )
    assert trainer.intake.describe() == words
    usage.used, usage.free = 950, 50
    trainer.tick()
    full = "no leases are given: the disk of run_dir is 95% full (replay.max_disk_used)"
    assert trainer.intake.describe() == f"{words}; {full}"


# Adapters.


def test_a_blob_comes_in_chunks_and_the_end_is_short(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("p")
    for offset in (0, 1000, 2000):
        client.send(BlobRequest(DIGEST, offset, 1000))
    trainer.tick()
    chunks = client.poll(0.0)
    assert [(chunk.offset, len(chunk.data)) for chunk in chunks] == [(0, 1000), (1000, 1000), (2000, 500)]
    assert b"".join(chunk.data for chunk in chunks) == BLOB


def test_a_blob_that_is_gone_or_an_offset_behind_its_end_is_missing(start: Start) -> None:
    trainer = start()
    client = trainer.channel.connect("p")
    for version in (1, 2):
        trainer.intake.publish(version, b"next", str(version) * 64)
    for request in (BlobRequest(DIGEST, 0, 10), BlobRequest("2" * 64, 4, 10), BlobRequest("1" * 64, 0, 10)):
        client.send(request)
    trainer.tick()
    assert client.poll(0.0) == [BlobMissing(DIGEST), BlobMissing("2" * 64), BlobChunk("1" * 64, 0, b"next")]


def test_an_offer_has_the_probe_of_its_policy(start: Start) -> None:
    trainer = start()
    trainer.intake.publish(1, b"next", "1" * 64, (b"ids!", b"logs"))
    client = trainer.channel.connect("p")
    for digest in ("1" * 64, DIGEST, "2" * 64):
        client.send(PolicyRequest(digest))
    trainer.tick()
    plain, missing = PolicyOffer(DIGEST), BlobMissing("2" * 64)
    assert client.poll(0.0) == [PolicyOffer("1" * 64, "", b"ids!", b"logs"), plain, missing]


def test_the_memory_of_a_policy_is_given_back_when_nobody_can_ask_for_it_any_more(start: Start) -> None:
    trainer = start()
    gone: list[int] = []
    for version in (1, 2, 3):
        trainer.intake.publish(version, b"next", str(version) * 64, release=partial(gone.append, version))
    assert gone == [1], "two are kept"
    trainer.intake.publish(4, b"next", "2" * 64, release=partial(gone.append, 4))
    assert gone == [1, 2], "the same weights again"


def test_a_policy_lies_in_a_file_where_there_is_room_and_chunks_come_out_of_it(start: Start, tmp_path: Path) -> None:
    given_back: list[int] = []
    with shared_memory(tmp_path) as memory:
        trainer = start(memory=memory)
        for version in (1, 2):
            trainer.intake.publish(version, b"next", str(version) * 64, release=partial(given_back.append, version))
        client = trainer.channel.connect("p")
        for request in (PolicyRequest("1" * 64), BlobRequest("1" * 64, 1, 2), PolicyRequest(DIGEST)):
            client.send(request)
        trainer.tick()
        offer, chunk, gone = client.poll(0.0)
        assert Path(offer.shared_file).read_bytes() == b"next"
        assert chunk == BlobChunk("1" * 64, 1, b"ex")
        assert gone == BlobMissing(DIGEST)
        assert given_back == [1, 2], "a policy is in memory once"
        assert memory.folder is not None
        assert len(list(memory.folder.iterdir())) == 2, "those of policies that went are gone"


def test_a_refused_version_counts_once_for_each_producer_and_shows(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    for name in ("p", "q"):
        client = trainer.producer(name)
        beat = Heartbeat(0, 64, [], 0, 0.0, refused_version=1, refusal="not what the trainer computes")
        client.say(beat, beat)
        assert caplog.text.count(f"{name} refuses policy v1: not what the trainer computes") == 1
        assert f"{name} (policy v0, refuses v1: not what the trainer computes, heard" in trainer.intake.describe()
    assert trainer.replay.counts["swaps_refused"] == 2
    assert [member.refused_version for member in trainer.intake.fleet()] == [1, 1]
    client.say(Heartbeat(2, 64, [], 0, 0.0), Heartbeat(2, 64, [], 0, 0.0, refused_version=3, refusal="again"))
    assert trainer.replay.counts["swaps_refused"] == 3


def test_a_chunk_that_no_frame_may_carry_is_refused_and_the_thread_goes_on(start: Start, short_dir: Path) -> None:
    endpoints = [f"ipc://{short_dir}/{name}" for name in ("control", "blobs")]
    trainer = start(ZmqServer(*endpoints, 65_536))
    blob = bytes(200_000)
    trainer.intake.publish(1, blob, "a" * 64)
    trainer.intake.start()
    client = ZmqClient("p", *endpoints, 65_536)
    try:
        received: list[Any] = []
        deadline = time.monotonic() + 10
        for request in (BlobRequest("a" * 64, 0, 2**26), BlobRequest("a" * 64, 0, 1000)):
            while not client.send(request):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        while len(received) < 2:
            assert time.monotonic() < deadline
            received += client.poll(0.1)
        assert received == [BlobMissing("a" * 64), BlobChunk("a" * 64, 0, bytes(1000))]
        trainer.intake.check()
    finally:
        client.close()
        trainer.intake.stop("stopping")


# Quarantine.


def quarantine(journal: FillableJournal) -> list[tuple[str, int]]:
    with closing(JournalReader(journal.path)) as reader:
        return [(frame.reason, frame.num_bytes) for frame in reader.refused_frames()]


def test_what_cannot_be_used_is_kept_for_inspection_with_its_reason(start: Start, journal: FillableJournal) -> None:
    trainer = start()
    producer = trainer.producer()
    lease = producer.leases[0]
    broken = renamed(answer(lease), rewards=b"\0\0")
    producer.channel.send_frame(b"garbage")
    producer.say(broken, Reject(["you too"]))
    (bad, num_bytes), invalid, wrong_side = quarantine(journal)
    assert (bad != "", num_bytes) == (True, 7)
    reason = f"group {lease.lease_id} of p is invalid: rewards has 2 bytes, expected 4 x 4"
    assert invalid == (reason, len(encode(broken)))
    assert wrong_side == ("body refused: Invalid value 'reject' - at `$.type`", len(encode(Reject(["you too"]))))
    assert journal.query("SELECT frame FROM frames WHERE id = 1") == [(b"garbage",)]


def test_a_flood_of_garbage_is_counted_and_32_frames_a_tick_are_kept(start: Start, journal: FillableJournal) -> None:
    trainer = start()
    producer = trainer.producer()
    for number in range(100):
        producer.channel.send_frame(f"garbage {number}".encode())
    trainer.tick()
    assert trainer.replay.counts["bad_frames"] == 100
    assert len(quarantine(journal)) == 32
    producer.channel.send_frame(b"more")
    trainer.tick()
    assert quarantine(journal)[31:] == [
        ("frame starts with b'ga', not b'SL'", 10),
        ("frame of 4 bytes is shorter than the 8-byte prefix", 4),
    ]


def test_garbage_on_a_full_disk_is_kept_in_bounds_and_holds_no_group_up(start: Start, journal: FillableJournal) -> None:
    trainer = start(groups_per_step=1)
    producer = trainer.producer(capacity=1)
    journal.full = True
    for _ in range(3):
        for _ in range(20):
            producer.channel.send_frame(b"garbage")
        trainer.tick()
    producer.say(answer(producer.leases[0]))
    journal.full = False
    trainer.tick()
    assert len(quarantine(journal)) == 32
    assert only(producer.all(Ack), Ack).outcome == "accepted"


# The thread.


def test_garbage_and_messages_of_the_wrong_side_are_counted_and_survived(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    producer = trainer.producer()
    good = encode(Heartbeat(0, 1, [], 0, 0.0))
    frames = [b"", b"SL", b"x" * 1000, good[:-1], good + b"\0", bytes([good[0] ^ 1]) + good[1:]]
    for frame in frames:
        producer.channel.send_frame(frame)
    trainer.tick()
    assert trainer.replay.counts["bad_frames"] == len(frames)
    producer.say(Reject(["you too"]), Policy(PolicyInfo(0, DIGEST, 1)), made_lease("s-1"))
    assert trainer.replay.counts["bad_frames"] == len(frames) + 3
    assert len([record for record in caplog.records if "refused a frame: " in record.getMessage()]) == 5
    assert only(producer.say(answer(producer.leases[0])), Ack).outcome == "accepted"


def test_a_message_of_the_wrong_side_is_named(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start().producer().say(Reject(["you too"]))
    assert "refused a frame: body refused: Invalid value 'reject'" in caplog.text


@pytest.mark.parametrize("reason", ["finished", "stopping"])
def test_the_thread_says_goodbye_to_everybody_and_waits_for_theirs(start: Start, reason: Any) -> None:
    trainer = start()
    clients = [trainer.producer(name).channel for name in "ab"]
    heard: list[Any] = []

    def answer_goodbyes() -> None:
        waiting = list(clients)
        while waiting:
            for client in list(waiting):
                farewells = [message for message in client.poll(0.01) if isinstance(message, Bye)]
                if farewells:
                    heard.extend(farewells)
                    client.send(Bye("stopping"))
                    waiting.remove(client)

    peers = threading.Thread(target=answer_goodbyes, daemon=True)
    peers.start()
    trainer.intake.start()
    began = time.monotonic()
    trainer.intake.stop(reason)
    assert time.monotonic() - began < 1.5
    assert not trainer.intake._thread.is_alive()
    peers.join(5)
    assert heard == [Bye(reason), Bye(reason)]
    trainer.intake.check()


@pytest.mark.usefixtures("short_farewell")
def test_a_producer_that_does_not_answer_a_goodbye_holds_nobody_up(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    trainer.intake.start()
    trainer.intake.stop("finished")
    assert not trainer.intake._thread.is_alive()
    assert producer.hear()[-1:] == [Bye("finished")]


def test_the_end_of_the_thread_is_raised_in_the_main_thread(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    trainer = start()

    def broken(timeout_s: float) -> list[Any]:
        raise OSError("socket gone")

    trainer.channel.poll = broken
    trainer.intake.check()
    trainer.intake.start()
    trainer.intake._thread.join(10)
    with pytest.raises(OSError, match="socket gone"):
        trainer.intake.check()
    trainer.intake.publish(1, b"next", "a" * 64)  # the main thread may not have looked yet
    trainer.intake.wake()
    trainer.intake.stop("stopping")
