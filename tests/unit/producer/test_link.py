"""The link against a scripted trainer over loopback: sessions, resends, downloads, and what ends the daemon."""

import hashlib
import time

import pytest

from producer.interfaces import Counters, Identity
from producer.link import Link
from protocol.codec import encode
from protocol.config import TransportSection
from protocol.errors import IncompatiblePeerError
from protocol.loopback import LoopbackServer
from protocol.messages import Ack, BlobRequest, Bye, Group, Heartbeat, Hello, Lease, Nack, PolicyInfo
from tests.scripted import facts, made_up_group
from tests.scripted_trainer import ScriptedTrainer, lease

TRANSPORT = TransportSection(
    heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5, blob_chunk_bytes=1024, max_message_bytes=65_536
)


def policy(version: int, blob: bytes = b"") -> PolicyInfo:
    return PolicyInfo(version, hashlib.sha256(blob).hexdigest(), len(blob))


class Events:
    """Keeps what the link says."""

    def __init__(self) -> None:
        self.sessions: list[PolicyInfo] = []
        self.leases: list[Lease] = []
        self.abandoned_ids: list[str] = []
        self.blobs: list[tuple[int, bytes]] = []
        self.outcome: list[BaseException | None] = []

    def session_began(self, policy: PolicyInfo) -> None:
        self.sessions.append(policy)

    def leased(self, lease: Lease) -> None:
        self.leases.append(lease)

    def abandoned(self, lease_id: str) -> None:
        self.abandoned_ids.append(lease_id)

    def policy_arrived(self, policy: PolicyInfo, blob: bytes, announced_at: float) -> None:
        self.blobs.append((policy.version, blob))

    def ended(self, error: BaseException | None) -> None:
        self.outcome.append(error)


class Setup:
    def __init__(self) -> None:
        self.server = LoopbackServer()
        self.client = self.server.connect("p")
        self.events = Events()
        self.counters = Counters()
        self.link = Link(
            self.client, Identity("p", facts(), 8), TRANSPORT, "loopback", self.events, self.counters, lambda: 1.5
        )
        self.blob = bytes(range(256)) * 20
        self.trainer = ScriptedTrainer(self.server, policy(0, self.blob))
        self.trainer.blobs[self.trainer.policy.digest] = self.blob

    def start(self) -> "Setup":
        self.trainer.start()
        self.link.start()
        return self

    def wait_for(self, condition, timeout_s=10.0):
        self.trainer.wait_for(condition, timeout_s)

    def take_leases(self, *numbers: int) -> None:
        before = len(self.events.leases)
        for number in numbers:
            self.trainer.send(lease(number))
        self.wait_for(lambda: len(self.events.leases) == before + len(numbers))

    def finish(self, number: int) -> None:
        self.link.answer(made_up_group(lease(number), 0))

    def groups(self) -> list[str]:
        return [group.lease_id for group in self.trainer.all(Group)]

    def end(self) -> None:
        self.link.stop(0.0)
        self.link.join(5)
        assert not self.link.is_alive()
        if self.trainer._thread.is_alive():
            self.trainer.stop()


@pytest.fixture
def setup():
    made = Setup()
    yield made
    if made.link.ident is not None:
        made.end()


def test_the_policy_is_downloaded_in_chunks_and_handed_over_once(setup):
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    setup.trainer.wait_for_message(Heartbeat, 3)
    assert setup.events.blobs == [(0, setup.blob)]
    assert [r.offset for r in setup.trainer.all(BlobRequest)] == list(range(0, 5120, 1024))
    (hello,) = setup.trainer.all(Hello)
    assert (hello.producer, hello.capacity, hello.held) == ("p", 8, [])


def test_lost_chunks_are_asked_for_again(setup):
    lost = []

    def loses(request: BlobRequest) -> bool:
        first_time = request.offset not in lost
        lost.append(request.offset)
        return first_time and request.offset in (1024, 4096)

    setup.trainer.loses_chunk = loses
    setup.start()
    setup.wait_for(lambda: setup.events.blobs, 15)
    assert setup.events.blobs == [(0, setup.blob)]
    assert sorted(lost) == [0, 1024, 1024, 2048, 3072, 4096, 4096]


def test_a_newer_policy_supersedes_a_running_download(setup):
    setup.trainer.loses_chunk = lambda request: request.digest == policy(0, setup.blob).digest
    setup.start()
    setup.trainer.wait_for_message(BlobRequest)
    newer = b"newer" * 1000
    setup.trainer.publish(policy(1, newer), newer)
    setup.wait_for(lambda: setup.events.blobs)
    assert setup.events.blobs == [(1, newer)]


def test_a_missing_blob_is_asked_for_again_with_the_next_announcement(setup):
    blob = setup.trainer.blobs.pop(setup.trainer.policy.digest)
    setup.start()
    setup.trainer.wait_for_message(BlobRequest, 8)
    setup.trainer.blobs[setup.trainer.policy.digest] = blob
    setup.wait_for(lambda: setup.events.blobs)
    assert setup.events.blobs == [(0, setup.blob)]


def test_a_lost_announcement_heals_with_the_next_heartbeat(setup):
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    setup.trainer.blobs[policy(1, b"x").digest] = b"x"
    setup.trainer.policy = policy(1, b"x")  # never announced on its own
    setup.wait_for(lambda: len(setup.events.blobs) == 2)
    assert setup.events.blobs[1] == (1, b"x")


def test_heartbeats_carry_the_counters_and_the_held_leases(setup):
    setup.counters.policy_version, setup.counters.tokens = 4, 99
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.trainer.acknowledges = False
    setup.take_leases(1, 2)
    setup.finish(2)
    setup.trainer.wait_for_message(Group)
    beats = len(setup.trainer.all(Heartbeat))
    setup.trainer.wait_for_message(Heartbeat, beats + 2)
    last = setup.trainer.all(Heartbeat)[-1]
    assert last == Heartbeat(4, 8, ["lease-1", "lease-2"], 99, 1.5)


def test_a_duplicate_lease_is_worked_on_once(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)
    setup.trainer.send(lease(1))
    setup.take_leases(2)
    assert [held.lease_id for held in setup.events.leases] == ["lease-1", "lease-2"]


def test_a_silent_trainer_is_noticed_and_greeted_again_with_what_is_held(setup, caplog):
    caplog.set_level("INFO", logger="producer")
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2)
    setup.trainer.silent = True
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    setup.trainer.wait_for_message(Hello, 2)
    assert "the trainer has been silent for 0.5 s; waiting for it at loopback" in caplog.text
    setup.trainer.silent = False
    setup.wait_for(lambda: setup.groups().count("lease-1") >= 2)
    assert setup.trainer.all(Hello)[-1].held == ["lease-2", "lease-1"]
    setup.finish(2)
    setup.wait_for(lambda: "lease-2" in setup.groups())
    assert len(setup.events.sessions) == 1
    assert setup.counters.abandoned == 0


def test_an_unacknowledged_group_is_sent_again_and_an_acknowledged_one_is_not(setup, monkeypatch):
    monkeypatch.setattr("producer.outbox._RESEND_AFTER_S", 0.2)
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)
    setup.finish(1)
    setup.trainer.wait_for_message(Group, 3)
    setup.trainer.send(Ack("lease-1", "accepted", setup.trainer.policy))
    beats = len(setup.trainer.all(Heartbeat))
    setup.wait_for(lambda: [h.held for h in setup.trainer.all(Heartbeat)[beats:]][-2:] == [[], []])
    count = len(setup.groups())
    time.sleep(0.5)
    assert len(setup.groups()) == count
    assert set(setup.groups()) == {"lease-1"}


def test_another_trainer_process_voids_all_leases(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    sent = len(setup.groups())
    setup.trainer.session = "session-2"
    setup.trainer.policy = policy(7, b"other")
    setup.trainer.blobs[setup.trainer.policy.digest] = b"other"
    setup.trainer.send(Bye("unknown_session"))
    setup.wait_for(lambda: len(setup.events.sessions) == 2)
    assert setup.events.sessions[1] == setup.trainer.policy
    setup.wait_for(lambda: setup.events.blobs and setup.events.blobs[-1] == (7, b"other"))
    setup.finish(2)  # its task had not noticed yet
    setup.take_leases(3)
    setup.finish(3)
    setup.wait_for(lambda: "lease-3" in setup.groups())
    assert setup.groups()[sent:] == ["lease-3"]
    assert setup.counters.abandoned == 2


def test_leases_that_the_trainer_does_not_know_are_dropped(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    setup.trainer.send(Nack("lease-1", "invalid", "3 rewards for 4 completions"))
    setup.trainer.send(Nack("lease-2", "unknown_lease"))
    setup.wait_for(lambda: setup.events.abandoned_ids == ["lease-2"])
    setup.wait_for(lambda: setup.trainer.all(Heartbeat)[-1].held == [])


def test_a_refused_lease_is_told_once(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)
    setup.link.answer(Nack("lease-1", "bad_prompt", "no"))
    setup.link.answer(Nack("lease-1", "bad_prompt", "no"))
    setup.trainer.wait_for_message(Nack)
    setup.take_leases(2)
    assert setup.trainer.all(Nack) == [Nack("lease-1", "bad_prompt", "no")]


def test_a_refusal_ends_the_link_with_every_problem(setup):
    setup.trainer.problems = ["another base model", "another tokenizer"]
    setup.start()
    setup.wait_for(lambda: setup.events.outcome)
    (error,) = setup.events.outcome
    assert isinstance(error, IncompatiblePeerError)
    assert "another base model" in str(error)
    assert "another tokenizer" in str(error)


def test_a_peer_of_another_release_ends_the_link(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.server.clients[setup.client.peer].put(b"", encode(Bye("finished"), schema_version=99))
    setup.wait_for(lambda: setup.events.outcome)
    (error,) = setup.events.outcome
    assert isinstance(error, IncompatiblePeerError)
    assert "schema 99" in str(error)


def test_a_bad_frame_is_survived(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.server.clients[setup.client.peer].put(b"", b"not a frame at all")
    setup.take_leases(1)


def test_finished_ends_the_link_without_an_error(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.trainer.send(Bye("finished"))
    setup.wait_for(lambda: setup.events.outcome)
    assert setup.events.outcome == [None]
    setup.finish(1)  # a task that ends later disturbs nothing


def test_stopping_delivers_what_is_finished_and_says_goodbye(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.link.answer(Nack("lease-2", "returned"))
    setup.trainer.acknowledges = True
    setup.link.stop(5.0)
    setup.link.join(5)
    setup.trainer.wait_for_message(Bye)
    kinds = [type(message) for message in setup.trainer.received if isinstance(message, Group | Nack | Bye)]
    assert sorted(kinds[:-1], key=str) == [Group, Nack]
    assert kinds[-1] is Bye
    assert setup.events.outcome == [None]


def test_stopping_without_a_trainer_takes_no_time(setup):
    setup.client.online = False
    setup.link.start()
    started = time.monotonic()
    setup.link.stop(30.0)
    setup.link.join(5)
    assert time.monotonic() - started < 1
    assert setup.events.outcome == [None]


def test_the_wait_for_a_trainer_is_visible(setup, caplog, monkeypatch):
    monkeypatch.setattr("producer.connection.REMIND_EVERY_S", 0.2)
    caplog.set_level("INFO", logger="producer")
    setup.client.online = False
    setup.link.start()
    setup.wait_for(lambda: caplog.text.count("waiting for the trainer at loopback (") >= 2)
