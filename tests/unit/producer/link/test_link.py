"""The link against a scripted trainer over loopback: sessions, resends, downloads, and what ends the daemon."""

import hashlib
import struct
import time

import pytest

from producer.interfaces import DownloadedPolicy, Probe
from producer.link.link import Link
from producer.link.mailbox import Mailbox
from producer.link.outbox import num_bytes
from producer.state import Counters, Identity, Workload
from protocol.config.transport import TransportSection
from protocol.errors import IncompatiblePeerError
from protocol.files import shared_memory as shared_memory_module
from protocol.files.shared_memory import shared_memory
from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import (
    LARGEST_POLICY_BYTES,
    Ack,
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
)
from tests.loopback import LoopbackServer
from tests.scripted import facts, made_up_group
from tests.scripted_trainer import ScriptedTrainer, lease

TRANSPORT = TransportSection(heartbeat_interval_s=0.1, blob_chunk_bytes=1024, max_message_bytes=65_536)


def policy(version: int, blob: bytes = b"") -> PolicyInfo:
    return PolicyInfo(version, hashlib.sha256(blob).hexdigest(), len(blob))


class Events:
    """Keeps what the link says."""

    def __init__(self) -> None:
        self.runs: list[PolicyInfo] = []
        self.sessions: list[PolicyInfo] = []
        self.leases: list[Lease] = []
        self.abandoned_ids: list[str] = []
        self.blobs: list[tuple[int, bytes]] = []
        self.probes: list[Probe | None] = []
        self.refusals: list[tuple[int, str]] = []
        self.fullness: list[bool] = []
        self.outcome: list[BaseException | None] = []
        self.fetches: list[tuple[int, bytes | None]] = []
        self.evaluations: list[PolicyInfo | None] = []

    def fetched(self, policy: PolicyInfo, downloaded: DownloadedPolicy | None) -> None:
        self.fetches.append((policy.version, downloaded and downloaded.blob))

    def evaluates(self, policy: PolicyInfo | None) -> None:
        self.evaluations.append(policy)

    def run_began(self, policy: PolicyInfo) -> None:
        self.runs.append(policy)

    def session_began(self, policy: PolicyInfo) -> None:
        self.sessions.append(policy)

    def leased(self, lease: Lease) -> None:
        self.leases.append(lease)

    def abandoned(self, lease_id: str) -> None:
        self.abandoned_ids.append(lease_id)

    def policy_arrived(self, downloaded: DownloadedPolicy) -> None:
        self.blobs.append((downloaded.policy.version, downloaded.blob))
        self.probes.append(downloaded.probe)

    def policy_refused(self, policy: PolicyInfo, reason: str) -> None:
        self.refusals.append((policy.version, reason))

    def outbox_full(self, full: bool) -> None:
        self.fullness.append(full)

    def ended(self, error: BaseException | None) -> None:
        self.outcome.append(error)


class Setup:
    def __init__(self, transport: TransportSection = TRANSPORT) -> None:
        self.server = LoopbackServer()
        self.client = self.server.connect("p")
        self.events = Events()
        self.counters = Counters()
        self.mailbox = Mailbox(self.client)
        self.link = Link(
            self.mailbox,
            Identity("p", facts(), 8, "merged"),
            transport,
            "loopback",
            self.events,
            self.counters,
            lambda: Workload((0, 0, 7), 2, 1, 1.5),
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
        self.mailbox.answer(made_up_group(lease(number), 0))

    def groups(self) -> list[str]:
        return [group.lease_id for group in self.trainer.all(Group)]

    def restart_trainer(self, newest: PolicyInfo, blob: bytes) -> None:
        """Another process, which knows nothing of the connection."""
        self.trainer.session += "+"
        self.trainer.policy = newest
        self.trainer.blobs[newest.digest] = blob
        self.trainer.send(Bye("unknown_session"))

    def end(self) -> None:
        self.link.stop(0.0)
        self.link.join(5)
        assert not self.link.is_alive()
        if self.trainer._thread.is_alive():
            self.trainer.stop()


IMPATIENT = pytest.mark.parametrize("setup", [{"heartbeat_timeout_s": 0.5}], ids=["impatient"], indirect=True)
"""Where silence is to be noticed; elsewhere a busy machine may take its time."""


@pytest.fixture
def setup(request):
    made = Setup(TRANSPORT.model_copy(update=getattr(request, "param", {})))
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
    assert (hello.producer, hello.capacity, hello.held, hello.swap_mode) == ("p", 8, [], "merged")
    assert hello.run_id == "", "it has worked for none"


def test_a_policy_comes_with_its_probe_and_a_refusal_goes_back(setup):
    digest = setup.trainer.policy.digest
    ids, logprobs = struct.pack("<2i", 5, 6), struct.pack("<f", -0.5)
    setup.trainer.offers[digest] = PolicyOffer(digest, "", ids, logprobs)
    setup.counters.refused_version, setup.counters.refusal = 3, "it is not what the trainer computes"
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    assert setup.events.probes == [((5, 6), (-0.5,))]
    beat = setup.trainer.wait_for_message(Heartbeat)[0]
    assert (beat.refused_version, beat.refusal) == (3, "it is not what the trainer computes")


@pytest.mark.parametrize("content", ["as offered", "damaged"])
def test_a_producer_of_the_same_host_reads_the_file_and_asks_for_chunks_only_if_it_is_bad(
    setup, content, tmp_path, monkeypatch
):
    monkeypatch.setattr(shared_memory_module, "ROOT", tmp_path)
    digest = setup.trainer.policy.digest
    with shared_memory() as memory:
        path = memory.write(memoryview(setup.blob if content == "as offered" else bytes(len(setup.blob))))
        setup.trainer.offers[digest] = PolicyOffer(digest, str(path))
        setup.start()
        setup.wait_for(lambda: setup.events.blobs)
    assert setup.events.blobs == [(0, setup.blob)]
    assert bool(setup.trainer.all(BlobRequest)) == (content == "damaged")


def test_what_the_trainer_evaluates_is_handed_over(setup):
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    evaluated = setup.trainer.policy
    setup.trainer.send(Policy(evaluated, evaluated))
    setup.wait_for(lambda: evaluated in setup.events.evaluations)
    setup.wait_for(lambda: setup.events.evaluations[-1] is None)


def test_an_older_policy_is_fetched_beside_the_newest_once_or_is_known_to_be_gone(setup):
    older, gone = b"older" * 1000, policy(1, b"gone")
    setup.trainer.blobs[policy(2, older).digest] = older
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    for _ in range(3):
        setup.mailbox.fetch(policy(2, older))
    setup.wait_for(lambda: setup.events.fetches)
    setup.mailbox.fetch(gone)
    setup.wait_for(lambda: len(setup.events.fetches) == 2)
    assert setup.events.fetches == [(2, older), (1, None)]
    assert setup.events.blobs == [(0, setup.blob)]
    setup.mailbox.fetch(policy(2, older))
    setup.wait_for(lambda: len(setup.events.fetches) == 3)


def test_a_policy_that_no_memory_holds_is_refused_and_the_next_one_served(setup):
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    setup.trainer.policy = PolicyInfo(1, "f" * 64, LARGEST_POLICY_BYTES)
    setup.trainer.send(Policy(setup.trainer.policy))
    setup.wait_for(lambda: setup.events.refusals)
    setup.mailbox.fetch(setup.trainer.policy)
    setup.wait_for(lambda: setup.events.fetches)
    setup.trainer.publish(policy(2, b"small"), b"small")
    setup.wait_for(lambda: len(setup.events.blobs) == 2)
    [(version, reason)] = setup.events.refusals
    assert version == 1
    assert reason.startswith("it is 1099511627776 bytes large")
    assert (setup.events.fetches, setup.events.blobs[1]) == ([(1, None)], (2, b"small"))


@pytest.mark.long
@IMPATIENT
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
    setup.trainer.wait_for_message(PolicyRequest, 2)
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
    assert last == Heartbeat(4, 8, ["lease-1", "lease-2"], 99, 1.5, waiting=3, generating=2, scoring=1, unacked=1)


def test_a_duplicate_lease_is_worked_on_once(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)
    setup.trainer.send(lease(1))
    setup.take_leases(2)
    assert [held.lease_id for held in setup.events.leases] == ["lease-1", "lease-2"]


@pytest.mark.long
@IMPATIENT
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
    assert (len(setup.events.runs), setup.events.sessions) == (1, [])
    assert setup.counters.abandoned == 0


@pytest.mark.long
def test_an_unacknowledged_group_is_sent_again_and_an_acknowledged_one_is_not(setup, monkeypatch):
    monkeypatch.setattr("producer.link.outbox._RESEND_AFTER_S", 0.2)
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


def test_another_process_of_the_same_run_gets_what_is_finished_and_what_goes_on(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2, 3, 4)
    setup.finish(1)
    setup.finish(4)
    setup.trainer.wait_for_message(Group, 2)
    setup.wait_for(lambda: setup.events.blobs)
    sent = len(setup.groups())
    setup.trainer.wants = lambda lease_id: lease_id not in ("lease-3", "lease-4")
    setup.restart_trainer(policy(0, b"other"), b"other")
    setup.wait_for(lambda: setup.events.sessions == [policy(0, b"other")])
    setup.wait_for(lambda: setup.events.blobs[1:] == [(0, b"other")])
    assert setup.trainer.all(Hello)[-1].held == ["lease-2", "lease-3", "lease-1", "lease-4"]
    setup.wait_for(lambda: setup.events.abandoned_ids == ["lease-3"])
    setup.finish(2)
    setup.finish(3)  # its task had not noticed yet
    setup.trainer.acknowledges, setup.trainer.outcome = True, "duplicate"
    setup.wait_for(lambda: "lease-2" in setup.groups())
    setup.trainer.send(Ack("lease-1", "duplicate", setup.trainer.policy))
    setup.wait_for(lambda: setup.trainer.all(Heartbeat)[-1].held == [])
    assert setup.groups()[sent:].count("lease-1") == 1
    assert "lease-3" not in setup.groups()
    assert len(setup.events.runs) == 1
    assert (setup.counters.abandoned, setup.counters.settled) == (1, 2)


def test_a_trainer_of_another_run_voids_all_leases(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    sent = len(setup.groups())
    setup.trainer.run_id = "run-2"
    setup.restart_trainer(policy(7, b"other"), b"other")
    setup.wait_for(lambda: setup.events.runs[1:] == [setup.trainer.policy])
    setup.wait_for(lambda: setup.events.blobs and setup.events.blobs[-1] == (7, b"other"))
    greeting = setup.trainer.all(Hello)[-1]
    assert (greeting.run_id, greeting.held) == ("run", ["lease-2", "lease-1"]), "the run whose leases they are"
    setup.finish(2)  # its task had not noticed yet
    setup.take_leases(3)
    setup.finish(3)
    setup.wait_for(lambda: "lease-3" in setup.groups())
    assert setup.groups()[sent:] == ["lease-3"]
    assert setup.events.sessions == []
    assert setup.counters.abandoned == 2


@pytest.mark.long
@IMPATIENT
def test_what_ends_between_hello_and_welcome_is_told_once_after_it(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2, 3)
    setup.trainer.silent = True
    setup.trainer.wait_for_message(Hello, 2)
    setup.finish(1)
    setup.mailbox.answer(Nack("lease-2", "reward_failed", "it raised"))
    setup.trainer.session = "session-2"
    setup.trainer.silent = False
    setup.trainer.wait_for_message(Nack)
    setup.wait_for(lambda: setup.trainer.all(Heartbeat)[-1].held == ["lease-3"])
    assert setup.groups() == ["lease-1"]
    assert setup.trainer.all(Nack) == [Nack("lease-2", "reward_failed", "it raised")]


def test_the_outbox_says_when_it_is_full_and_when_it_is_not(caplog):
    caplog.set_level("INFO", logger="producer")
    one = num_bytes(made_up_group(lease(1), 0))
    setup = Setup(TRANSPORT.model_copy(update={"max_unacked_bytes": one}))
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    assert setup.events.fullness == []
    setup.finish(2)
    setup.wait_for(lambda: setup.events.fullness == [True])
    delivery = setup.link.delivery()
    assert (delivery.connected, delivery.held, delivery.unacked, delivery.full) == (True, 2, 2, True)
    assert delivery.unacked_bytes == one + num_bytes(made_up_group(lease(2), 0))
    assert 0 <= delivery.heard_ago_s < 5
    setup.trainer.send(Ack("lease-2", "accepted", setup.trainer.policy))
    setup.wait_for(lambda: setup.events.fullness == [True, False])
    setup.end()
    assert [record.message for record in caplog.records if "generation" in record.message] == [
        f"generation pauses: 2 groups ({delivery.unacked_bytes} bytes) wait for acknowledgement "
        "(transport.max_unacked_bytes)",
        f"generation resumes: 1 groups ({one} bytes) wait for acknowledgement (transport.max_unacked_bytes)",
    ]
    assert "1 finished groups were not acknowledged and are lost" in caplog.text


def test_a_group_that_no_frame_holds_is_refused_instead(setup):
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)

    def send(message, original=setup.client.send):
        if isinstance(message, Group):
            raise CodecError("Group of 70000 bytes is above transport.max_message_bytes=65536")
        return original(message)

    setup.client.send = send
    setup.finish(1)
    (nack,) = setup.trainer.wait_for_message(Nack)
    assert (nack.lease_id, nack.reason) == ("lease-1", "generation_failed")
    assert "above transport.max_message_bytes" in nack.detail
    setup.wait_for(lambda: setup.trainer.all(Heartbeat)[-1].held == [])
    assert len(setup.trainer.all(Nack)) == 1
    assert setup.link.delivery().unacked_bytes == 0


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
    setup.mailbox.answer(Nack("lease-1", "bad_prompt", "no"))
    setup.mailbox.answer(Nack("lease-1", "bad_prompt", "no"))
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


def test_what_the_release_before_refused_of_an_earlier_connection_is_no_verdict(setup):
    """Two refusals at once: the first makes the link connect anew, the second is left over."""
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)
    mailbox = setup.server.clients[setup.client.peer]
    refusal = encode(Reject(["peer speaks protocol schema 2, this process speaks 1"]), schema_version=1)
    with mailbox._condition:
        mailbox.put(b"", refusal)
        mailbox.put(b"", refusal)
    setup.trainer.wait_for_message(Hello, 2)
    setup.take_leases(2)
    assert (setup.client.schema_version, setup.events.outcome) == (2, [])


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
    setup.mailbox.answer(Nack("lease-2", "returned"))
    setup.trainer.acknowledges = True
    setup.link.stop(5.0)
    setup.link.join(10)
    setup.trainer.wait_for_message(Bye)
    kinds = [type(message) for message in setup.trainer.received if isinstance(message, Group | Nack | Bye)]
    assert sorted(kinds[:-1], key=str) == [Group, Nack]
    assert kinds[-1] is Bye
    assert setup.events.outcome == [None]


def test_stopping_waits_for_the_acknowledgement_of_what_is_finished(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)
    setup.finish(1)
    setup.link.stop(30.0)
    setup.trainer.wait_for_message(Group)
    setup.trainer.wait_for_message(Heartbeat, len(setup.trainer.all(Heartbeat)) + 2)
    assert setup.trainer.all(Bye) == []
    setup.trainer.send(Ack("lease-1", "accepted", setup.trainer.policy))
    setup.link.join(10)
    setup.trainer.wait_for_message(Bye)
    assert setup.groups() == ["lease-1"]
    assert setup.events.outcome == [None]


@IMPATIENT
@pytest.mark.parametrize(("silent", "goodbyes"), [(False, [Bye("stopping")]), (True, [])])
def test_stopping_ends_in_time_without_an_acknowledgement(setup, caplog, silent, goodbyes):
    setup.trainer.acknowledges = False
    setup.start()
    setup.trainer.wait_for_message(Hello)
    setup.take_leases(1)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    setup.trainer.silent = silent  # then it is noticed after heartbeat_timeout_s=0.5, and nobody is left to tell
    started = time.monotonic()
    setup.link.stop(10.0 if silent else 0.3)
    setup.link.join(10)
    assert 0.25 < time.monotonic() - started < 8
    setup.trainer.wait_for_message(Bye, len(goodbyes))
    setup.trainer.stop()
    assert setup.trainer.all(Bye) == goodbyes
    assert "1 finished groups were not acknowledged and are lost" in caplog.text


def test_stopping_without_a_trainer_takes_no_time(setup):
    setup.client.online = False
    setup.link.start()
    started = time.monotonic()
    setup.link.stop(30.0)
    setup.link.join(10)
    assert time.monotonic() - started < 10
    assert setup.events.outcome == [None]


def test_the_wait_for_a_trainer_is_visible(setup, caplog, monkeypatch):
    monkeypatch.setattr("producer.link.connection.REMIND_EVERY_S", 0.2)
    caplog.set_level("INFO", logger="producer")
    setup.client.online = False
    setup.link.start()
    setup.wait_for(lambda: caplog.text.count("waiting for the trainer at loopback (") >= 2)
