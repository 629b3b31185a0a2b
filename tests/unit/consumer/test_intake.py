"""The I/O thread against peers of every kind: each delivery is answered once, and nothing a peer sends ends the thread."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consumer import intake as intake_module
from consumer.intake import Intake
from protocol.codec import encode
from protocol.errors import DatasetError
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
    Reject,
    Sampling,
    Welcome,
)
from protocol.zmq_channel import ZmqClient, ZmqServer
from replay.buffer import RolloutBuffer
from replay.groups import GroupShape
from tests.scripted import facts, made_up_group
from tests.unit.replay.builders import buffer

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


class Trainer:
    """An intake whose ticks and clock are the test's, with version 0 published."""

    def __init__(
        self, channel: Any = None, prompts: Any = None, replay: RolloutBuffer | None = None, **budget: int
    ) -> None:
        self.channel = channel or LoopbackServer()
        self.replay = replay or buffer(**budget)
        self.now = 100.0
        self.intake = Intake(
            self.channel,
            self.replay,
            prompts or Prompts(),
            needs=NEEDS,
            shape=GroupShape(num_generations=4, num_rewards=1, max_completion_length=4, vocab_size=12),
            sampling=SAMPLING,
            run_id="run",
            session="session",
            lease_timeout_s=60.0,
            heartbeat_interval_s=1.0,
            heartbeat_timeout_s=6.0,
            keep_blobs=2,
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


def only(messages: list[Any], kind: type) -> Any:
    [message] = [message for message in messages if isinstance(message, kind)]
    return message


def answer(lease: Lease, version: int = 0, **changes: Any) -> Group:
    return made_up_group(lease, version, **changes)


def renamed(group: Group, **changes: Any) -> Group:
    return Group(**({name: getattr(group, name) for name in group.__struct_fields__} | changes))


# The handshake.


def test_a_producer_that_fits_is_welcomed_and_leased_to() -> None:
    trainer = Trainer()
    producer = trainer.producer()
    assert producer.all(Welcome) == [Welcome("run", "session", PolicyInfo(0, DIGEST, len(BLOB)), 1.0)]
    assert [lease.lease_id for lease in producer.leases] == ["s-1", "s-2"]
    assert producer.leases[0] == Lease("s-1", 0, 1, "0", {"answer": 1}, SAMPLING, 0, 60.0)
    assert trainer.intake.num_producers == 1


def test_a_producer_that_does_not_fit_gets_every_reason_with_its_fix(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
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


def test_another_release_is_told_so_and_counted() -> None:
    trainer = Trainer()
    client = trainer.channel.connect("old")
    client.send_frame(encode(Hello("old", facts(), 1), schema_version=7))
    trainer.tick()
    [reject] = client.poll(0.0)
    assert reject == Reject(
        ["peer speaks protocol schema 7, this process speaks 1: install the same release on both sides"]
    )
    assert trainer.replay.counts["bad_frames"] == 1


def test_a_peer_that_never_said_hello_is_asked_to() -> None:
    trainer = Trainer()
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


def test_two_producers_share_the_leases_by_their_room() -> None:
    trainer = Trainer(groups_per_step=9)
    small, large = trainer.producer("small", capacity=0), trainer.producer("large", capacity=0)
    small.channel.send(Heartbeat(0, 3, [], 0, 0.0))
    large.channel.send(Heartbeat(0, 5, [], 0, 0.0))
    trainer.tick()
    assert (len(small.leases), len(large.leases)) == (3, 5)
    assert len({lease.prompt_id for lease in small.leases + large.leases}) == 8


def test_a_full_producer_gets_one_lease_for_each_answer() -> None:
    trainer = Trainer(groups_per_step=9)
    producer = trainer.producer(capacity=2)
    assert len(producer.leases) == 2
    producer.say(answer(producer.leases[0]))
    assert len(producer.leases) == 3
    producer.say(Nack(producer.leases[1].lease_id, "generation_failed", "out of memory"))
    assert len(producer.leases) == 4


def test_leases_wait_for_the_staleness_budget() -> None:
    trainer = Trainer(groups_per_step=2, max_staleness=1)
    producer = trainer.producer()
    assert len(producer.leases) == 4
    producer.say(*[answer(lease) for lease in producer.leases])
    assert len(producer.leases) == 4
    assert trainer.replay.next_batch(0.0) is not None
    trainer.intake.publish(1, b"next", "a" * 64)
    trainer.tick()
    assert [lease.policy_floor for lease in producer.leases[4:]] == [1, 1]


def test_a_new_policy_is_announced_once_and_with_every_acknowledgement() -> None:
    trainer = Trainer(groups_per_step=4)
    producer = trainer.producer(capacity=4)
    producer.inbox.clear()
    trainer.intake.publish(1, b"next", "a" * 64)
    trainer.tick()
    trainer.tick()
    new = PolicyInfo(1, "a" * 64, 4)
    assert producer.hear() == [Policy(new)]
    assert producer.beat(capacity=4) == [Policy(new)]
    assert only(producer.say(answer(made_lease("s-1"))), Ack) == Ack("s-1", "accepted", new)


def made_lease(lease_id: str) -> Lease:
    return Lease(lease_id, 0, 1, "0", {}, SAMPLING, 0, 60.0)


def test_an_expired_lease_goes_to_somebody_else() -> None:
    trainer = Trainer(groups_per_step=1)
    slow = trainer.producer("slow", capacity=1)
    fast = trainer.producer("fast", capacity=1)
    assert (len(slow.leases), len(fast.leases)) == (1, 0)
    for _ in range(12):
        trainer.now += 5
        slow.beat(capacity=0)  # alive, and wants nothing more
        fast.beat(capacity=1)
    assert trainer.replay.counts["expired"] == 1
    assert [lease.prompt_id for lease in fast.leases] == [slow.leases[0].prompt_id] == [0]
    assert only(slow.say(answer(slow.leases[0])), Ack).outcome == "accepted"
    assert only(fast.say(answer(fast.leases[0])), Ack).outcome == "duplicate"


def test_leases_of_a_trainer_that_is_gone_take_no_room() -> None:
    trainer = Trainer(groups_per_step=4)
    producer = trainer.producer(capacity=2, held=["dead-1", "dead-2"])
    assert len(producer.leases) == 2


def test_a_lease_that_two_heartbeats_do_not_name_goes_out_again() -> None:
    """It was lost on the way; its deadline may be an hour away."""
    trainer = Trainer(groups_per_step=2)
    producer = trainer.producer(capacity=2)
    kept, lost = (lease.lease_id for lease in producer.leases)
    producer.beat(capacity=2, held=[kept])
    assert len(producer.leases) == 2, "a heartbeat may cross a lease that is on its way"
    producer.beat(capacity=2, held=[kept, lost])
    producer.beat(capacity=2, held=[kept])
    assert len(producer.leases) == 2, "not two in a row"
    producer.beat(capacity=2, held=[kept])
    assert [lease.prompt_id for lease in producer.leases] == [0, 1, 1]
    assert trainer.replay.counts["released"] == 1


def test_bad_prompts_are_skipped_and_counted_and_the_others_go_out() -> None:
    trainer = Trainer(prompts=Prompts(bad=lambda prompt_id: prompt_id % 2 == 0), groups_per_step=3)
    producer = trainer.producer()
    assert [lease.prompt_id for lease in producer.leases] == [1, 3, 5]
    assert trainer.replay.counts["failed_bad_prompt"] == trainer.replay.counts["prompts_skipped"] == 3


@pytest.fixture
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose producers do not answer a goodbye."""
    monkeypatch.setattr(intake_module, "_FAREWELL_S", 0.1)


@pytest.mark.usefixtures("short_farewell")
def test_a_column_that_cannot_travel_is_a_bad_prompt(caplog: pytest.LogCaptureFixture) -> None:
    prompts = Prompts()
    trainer = Trainer(prompts=prompts)
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


def test_every_outcome_is_acknowledged() -> None:
    trainer = Trainer(groups_per_step=3)
    producer = trainer.producer()
    first, dull, _ = producer.leases
    assert only(producer.say(answer(first)), Ack).outcome == "accepted"
    assert only(producer.say(answer(first)), Ack).outcome == "duplicate"
    assert only(producer.say(answer(dull, rewards=[1.0] * 4)), Ack).outcome == "no_signal"


def test_an_invalid_group_is_refused_with_the_reason_and_its_prompt_goes_out_again() -> None:
    trainer = Trainer(groups_per_step=1)
    producer = trainer.producer()
    [lease] = producer.leases
    broken = renamed(answer(lease), rewards=b"\0\0")
    assert only(producer.say(broken), Nack) == Nack(lease.lease_id, "invalid", "rewards has 2 bytes, expected 4 x 4")
    assert [(again.prompt_id, again.attempt) for again in producer.leases[1:]] == [(0, 2)]
    assert trainer.replay.counts["failed_invalid"] == 1


def test_a_version_that_was_never_published_is_invalid() -> None:
    trainer = Trainer()
    producer = trainer.producer()
    nack = only(producer.say(answer(producer.leases[0], version=1)), Nack)
    assert (nack.reason, nack.detail) == ("invalid", "policy version 1 was never published")


def test_a_lease_of_another_trainer_is_unknown() -> None:
    trainer = Trainer()
    producer = trainer.producer()
    assert only(producer.say(answer(made_lease("old-1"))), Nack) == Nack(
        "old-1", "unknown_lease", "not a lease of this trainer"
    )
    broken = renamed(answer(made_lease("old-2")), rewards=b"")
    assert only(producer.say(broken), Nack).reason == "invalid"
    producer.say(Nack("old-3", "reward_failed", "boom"))
    assert trainer.replay.counts["unknown_lease"] == 3
    assert trainer.replay.counts["failed_invalid"] == 0


def test_an_endless_list_of_rewards_or_tokens_is_refused() -> None:
    trainer = Trainer(groups_per_step=1)
    producer = trainer.producer()
    for field in ("rewards", "completion_ids", "logprobs", "truncated", "completion_lengths"):
        [*_, lease] = producer.leases
        endless = renamed(answer(lease), **{field: b"\0" * 4_000_000})
        assert f"{field} has 4000000 bytes" in only(producer.say(endless), Nack).detail


def test_a_failure_is_logged_with_its_reason_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(groups_per_step=300)
    producer = trainer.producer(capacity=300)
    producer.say(*[Nack(lease.lease_id, "reward_failed", "KeyError: 'answer'") for lease in producer.leases[:250]])
    lines = [record.getMessage() for record in caplog.records if "KeyError" in record.getMessage()]
    assert len(lines) == 5 + 2
    assert lines[0] == "p could not answer a prompt: reward_failed: KeyError: 'answer'"
    assert lines[-1].endswith("(200 of this kind so far)")


# Presence.


def test_a_silent_producer_is_given_up_and_its_leases_go_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
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


def test_a_producer_that_says_goodbye_frees_its_leases() -> None:
    trainer = Trainer()
    producer = trainer.producer()
    producer.say(Bye("stopping"))
    assert trainer.intake.num_producers == 0
    assert trainer.replay.counts["released"] == 2
    assert trainer.intake.describe() == "no producer is connected; start one with: rl-producer --config FILE"


def test_a_producer_that_reconnects_keeps_what_it_holds() -> None:
    trainer = Trainer(groups_per_step=3)
    producer = trainer.producer(capacity=3)
    held, lost, finished = producer.leases
    producer.channel.reset()
    producer.inbox.clear()
    producer.hello(3, [held.lease_id, finished.lease_id])
    assert trainer.intake.num_producers == 1
    assert [(lease.prompt_id, lease.attempt) for lease in producer.leases] == [(lost.prompt_id, 2)]
    assert only(producer.say(answer(finished)), Ack).outcome == "accepted"
    assert trainer.replay.counts["released"] == 1


def test_a_peer_that_changes_its_name_leaves_nothing_behind() -> None:
    trainer = Trainer()
    producer = trainer.producer("before")
    assert len(producer.leases) == 2
    producer.name = "after"
    producer.hello()
    assert trainer.intake.num_producers == 1
    assert trainer.replay.depth()["leased"] == 2
    assert [lease.attempt for lease in producer.leases] == [1, 1, 2, 2]


def test_a_producer_that_cannot_be_reached_is_given_up() -> None:
    trainer = Trainer()
    producer = trainer.producer(capacity=0)
    trainer.channel.clients.pop(producer.channel.peer)
    trainer.channel.inbox.put(producer.channel.peer, encode(Heartbeat(0, 5, [], 0, 0.0)))
    trainer.tick()
    assert trainer.intake.num_producers == 0
    assert trainer.replay.depth()["leased"] == 0


def test_tokens_are_counted_once_however_often_a_producer_comes_back() -> None:
    trainer = Trainer()
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


def test_who_waits_for_whom_in_words() -> None:
    trainer = Trainer(groups_per_step=4)
    first, _ = trainer.producer("a", capacity=3), trainer.producer("b", capacity=0)
    first.beat(version=0, capacity=3)
    first.say(answer(first.leases[0]))
    assert trainer.intake.describe() == "2 producer(s) on policy -1, 0, 3 leases out, 1 groups ready"


# Adapters.


def test_a_blob_comes_in_chunks_and_the_end_is_short() -> None:
    trainer = Trainer()
    client = trainer.channel.connect("p")
    for offset in (0, 1000, 2000):
        client.send(BlobRequest(DIGEST, offset, 1000))
    trainer.tick()
    chunks = client.poll(0.0)
    assert [(chunk.offset, len(chunk.data)) for chunk in chunks] == [(0, 1000), (1000, 1000), (2000, 500)]
    assert b"".join(chunk.data for chunk in chunks) == BLOB


def test_a_blob_that_is_gone_or_an_offset_behind_its_end_is_missing() -> None:
    trainer = Trainer()
    client = trainer.channel.connect("p")
    for version in (1, 2):
        trainer.intake.publish(version, b"next", str(version) * 64)
    for request in (BlobRequest(DIGEST, 0, 10), BlobRequest("2" * 64, 4, 10), BlobRequest("1" * 64, 0, 10)):
        client.send(request)
    trainer.tick()
    assert client.poll(0.0) == [BlobMissing(DIGEST), BlobMissing("2" * 64), BlobChunk("1" * 64, 0, b"next")]


def test_a_chunk_that_no_frame_may_carry_is_refused_and_the_thread_goes_on(short_dir: Path) -> None:
    endpoints = [f"ipc://{short_dir}/{name}" for name in ("control", "blobs")]
    trainer = Trainer(ZmqServer(*endpoints, 65_536))
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


# The thread.


def test_garbage_and_messages_of_the_wrong_side_are_counted_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
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


def test_a_message_of_the_wrong_side_is_named(caplog: pytest.LogCaptureFixture) -> None:
    Trainer().producer().say(Reject(["you too"]))
    assert "p sent Reject, which only a trainer sends" in caplog.text


@pytest.mark.parametrize("reason", ["finished", "stopping"])
def test_the_thread_says_goodbye_to_everybody_and_waits_for_theirs(reason: Any) -> None:
    trainer = Trainer()
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
def test_a_producer_that_does_not_answer_a_goodbye_holds_nobody_up() -> None:
    trainer = Trainer()
    producer = trainer.producer()
    trainer.intake.start()
    trainer.intake.stop("finished")
    assert not trainer.intake._thread.is_alive()
    assert producer.hear()[-1:] == [Bye("finished")]


def test_the_end_of_the_thread_is_raised_in_the_main_thread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    trainer = Trainer()

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
