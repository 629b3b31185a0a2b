"""The link against a scripted trainer over loopback: sessions, resends, and what ends the daemon."""

import time

import pytest
from msgspec import structs

from campaigns.fuzz.mutations import sealed
from producer.link.events import LeaseAbandoned, LinkEnded, OutboxFull, RunBegan, SessionBegan
from producer.link.outbox import num_bytes
from protocol.errors import BundleChangedError, ExitCode, IncompatiblePeerError
from protocol.wire.codec import CodecError, encode
from protocol.wire.messages import Ack, BundleOffer, Bye, Group, Heartbeat, Hello, Lease, Nack, Reject, RunPlan
from tests.scripted import made_up_group
from tests.scripted_trainer import lease
from tests.unit.producer.link.linked import TRANSPORT, Setup, policy


def test_heartbeats_carry_the_counters_and_the_held_leases(setup):
    setup.start()
    setup.trainer.acknowledges = False
    setup.take_leases(1, 2)
    setup.counters.policy_version, setup.counters.tokens = 4, 99
    setup.counters.refused_version, setup.counters.refusal = 5, "it is not what the trainer computes"
    setup.counters.num_refused = 1
    setup.finish(2)
    setup.trainer.wait_for_message(Group)
    setup.server.clients[setup.client.peer].put(b"", b"not a frame at all")  # which is survived
    setup.trainer.wait_for_message(Heartbeat, len(setup.trainer.all(Heartbeat)) + 2)
    last = setup.trainer.all(Heartbeat)[-1]
    assert last == Heartbeat(
        4, 8, ["lease-1", "lease-2"], 99, 1.5, waiting=3, generating=2, scoring=1, unacked=1,
        refused_version=5, refusal="it is not what the trainer computes", num_refused=1,
    )  # fmt: skip


@pytest.mark.parametrize("setup", [{"heartbeat_timeout_s": 0.1}], indirect=True)
def test_a_greeting_that_nobody_answers_is_repeated(setup):
    setup.trainer.silent = True
    setup.start()
    setup.trainer.wait_for_message(Hello, 2)


def test_a_heartbeat_is_sent_once_per_interval(setup, monkeypatch):
    sent: list[Heartbeat] = []
    monkeypatch.setattr(setup.client, "send", sent.append)
    monkeypatch.setattr(setup.link, "_interval_s", 1.0)
    for now in (5.0, 5.5, 5.99, 6.0, 6.5):
        setup.link._send_due(now)
    assert [type(message) for message in sent] == [Heartbeat] * 2
    setup.counters.refused_version, setup.counters.num_refused = 1, 1
    for now in (6.6, 6.7):
        setup.link._send_due(now)
    assert [message.refused_version for message in sent] == [-1, -1, 1], "a refusal at once"


def test_a_lease_is_worked_on_once_and_its_refusal_is_told_once(setup):
    setup.start()
    setup.take_leases(1)
    setup.trainer.send(lease(1))
    for _ in range(2):
        setup.mailbox.put(Nack("lease-1", "bad_prompt", "no"))
    setup.trainer.wait_for_message(Nack)
    setup.take_leases(2)
    assert setup.trainer.all(Nack) == [Nack("lease-1", "bad_prompt", "no")]
    assert [held.lease_id for held in setup.events.of(Lease)] == ["lease-1", "lease-2"]


def test_another_process_of_the_same_run_gets_what_is_finished_and_what_goes_on(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.take_leases(1, 2, 3, 4)
    setup.finish(1)
    setup.finish(4)
    setup.trainer.wait_for_message(Group, 2)
    setup.wait_for(lambda: setup.events.blobs)
    sent = len(setup.groups())
    setup.trainer.wants = lambda lease_id: lease_id not in ("lease-3", "lease-4")
    setup.restart_trainer(setup.trainer.policy, setup.blob)
    setup.wait_for(lambda: setup.events.of(SessionBegan) == [(setup.trainer.policy, RunPlan())])
    setup.wait_for(lambda: setup.events.blobs[1:] == [(0, setup.blob)])  # its version 0 might be another one
    assert setup.trainer.all(Hello)[-1].held == ["lease-2", "lease-3", "lease-1", "lease-4"]
    setup.wait_for(lambda: setup.events.of(LeaseAbandoned) == ["lease-3"])
    setup.finish(2)
    setup.finish(3)  # its task had not noticed yet
    setup.trainer.acknowledges, setup.trainer.outcome = True, "duplicate"
    setup.wait_for(lambda: "lease-2" in setup.groups())
    setup.trainer.send(Ack("lease-1", "duplicate", setup.trainer.policy))
    setup.wait_for(lambda: setup.trainer.all(Heartbeat)[-1].held == [])
    assert setup.groups()[sent:].count("lease-1") == 1
    assert "lease-3" not in setup.groups()
    assert len(setup.events.of(RunBegan)) == 1
    assert (setup.counters.abandoned, setup.counters.settled) == (1, 2)


def test_a_trainer_of_another_run_voids_all_leases(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    sent = len(setup.groups())
    setup.trainer.run_id = "run-2"
    setup.restart_trainer(policy(7, b"other"), b"other")
    setup.wait_for(lambda: setup.events.of(RunBegan)[1:] == [(setup.trainer.policy, RunPlan())])
    setup.wait_for(lambda: setup.events.blobs and setup.events.blobs[-1] == (7, b"other"))
    greeting = setup.trainer.all(Hello)[-1]
    assert (greeting.run_id, greeting.held) == ("run", ["lease-2", "lease-1"]), "the run whose leases they are"
    setup.finish(2)  # its task had not noticed yet
    setup.take_leases(3)
    setup.finish(3)
    setup.wait_for(lambda: "lease-3" in setup.groups())
    assert setup.groups()[sent:] == ["lease-3"]
    assert setup.events.of(SessionBegan) == []
    assert setup.counters.abandoned == 2


def test_the_outbox_says_when_it_is_full_and_when_it_is_not(caplog):
    caplog.set_level("INFO", logger="producer")
    one = num_bytes(made_up_group(lease(1), 0))
    setup = Setup(TRANSPORT.model_copy(update={"max_unacked_bytes": one}))
    setup.trainer.acknowledges = False
    setup.start()
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    assert setup.events.of(OutboxFull) == []
    setup.finish(2)
    setup.wait_for(lambda: setup.events.of(OutboxFull) == [True])
    delivery = setup.link.delivery()
    assert (delivery.connected, delivery.held, delivery.unacked, delivery.full) == (True, 2, 2, True)
    assert delivery.unacked_bytes == one + num_bytes(made_up_group(lease(2), 0))
    assert 0 <= delivery.heard_ago_s < 5
    setup.trainer.send(Ack("lease-2", "accepted", setup.trainer.policy))
    setup.wait_for(lambda: setup.events.of(OutboxFull) == [True, False])
    setup.end()
    assert f"generation pauses: 2 groups ({delivery.unacked_bytes} bytes) wait for acknowledgement" in caplog.text
    assert f"generation resumes: 1 groups ({one} bytes) wait for acknowledgement" in caplog.text
    assert "1 finished groups were not acknowledged and are lost" in caplog.text


def test_a_group_that_no_frame_holds_is_refused_instead(setup):
    setup.start()
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


def test_leases_that_the_trainer_does_not_know_are_dropped(setup, caplog):
    setup.trainer.acknowledges = False
    setup.start()
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.trainer.wait_for_message(Group)
    setup.trainer.send(Nack("lease-1", "invalid", "3 rewards for 4 completions"))
    setup.trainer.send(Nack("lease-2", "unknown_lease"))
    setup.wait_for(lambda: setup.events.of(LeaseAbandoned) == ["lease-2"])
    setup.wait_for(lambda: setup.trainer.all(Heartbeat)[-1].held == [])
    assert "the trainer refused a group: 3 rewards for 4 completions" in caplog.text


def test_a_refusal_ends_the_link_with_every_problem(setup):
    setup.trainer.problems = ["another base model", "another tokenizer"]
    setup.trainer.start()
    setup.link.start()
    setup.wait_for(lambda: setup.events.of(LinkEnded))
    with pytest.raises(IncompatiblePeerError, match=r"(?s)another base model.*another tokenizer"):
        raise setup.events.of(LinkEnded)[0]


def test_a_peer_of_another_release_ends_the_link(setup):
    setup.start()
    setup.server.clients[setup.client.peer].put(b"", sealed(encode(Bye("finished"))[8:], 99))
    setup.wait_for(lambda: setup.events.of(LinkEnded))
    with pytest.raises(IncompatiblePeerError, match="schema 99"):
        raise setup.events.of(LinkEnded)[0]


def test_a_refusal_over_an_earlier_connection_is_no_verdict(setup):
    """Two refusals at once: the first makes the link connect anew, the second is left over."""
    setup.start()
    setup.take_leases(1)
    mailbox = setup.server.clients[setup.client.peer]
    refusal = encode(Reject(["the trainer is another one now"]))
    with mailbox._condition:
        mailbox.put(b"", refusal)
        mailbox.put(b"", refusal)
    setup.trainer.wait_for_message(Hello, 2)
    setup.take_leases(2)
    assert setup.events.of(LinkEnded) == []


def test_finished_ends_the_link_without_an_error(setup):
    setup.start()
    setup.trainer.send(Bye("finished"))
    setup.wait_for(lambda: setup.events.of(LinkEnded))
    assert (setup.events.of(LinkEnded), setup.server.clients) == ([None], {})
    setup.finish(1)  # a task that ends later disturbs nothing


@pytest.mark.parametrize(("served", "refused", "ends"), [(-1, 1, True), (-1, 0, False), (4, 1, False)])
def test_a_trainer_that_stops_ends_a_producer_that_refuses_its_policies_and_serves_none(setup, served, refused, ends):
    setup.start()
    setup.take_leases(1)
    counters = setup.counters
    counters.policy_version, counters.refused_version, counters.num_refused = served, 5, refused
    counters.refusal = "the probe differs by 0.5"
    setup.trainer.send(Bye("stopping"))
    if not ends:
        setup.trainer.wait_for_message(Hello, 2)
        assert setup.events.of(LinkEnded) == []
        return
    setup.wait_for(lambda: setup.events.of(LinkEnded))
    [error] = setup.events.of(LinkEnded)
    assert error.exit_code == ExitCode.POLICY_REFUSED
    assert "no policy version is served here: v5 is refused: the probe differs by 0.5. Repair" in str(error)


def test_what_was_refused_of_another_trainer_process_is_not_told_the_next(setup):
    counters = setup.counters
    counters.policy_version, counters.refused_version, counters.num_refused = 4, 5, 3
    setup.start()
    first, *_ = setup.trainer.wait_for_message(Heartbeat)
    assert (first.policy_version, first.refused_version, first.num_refused) == (-1, -1, 0)


def test_stopping_delivers_what_is_finished_waits_for_its_acknowledgement_and_says_goodbye(setup):
    setup.trainer.acknowledges = False
    setup.start()
    setup.take_leases(1, 2)
    setup.finish(1)
    setup.mailbox.put(Nack("lease-2", "returned"))
    setup.link.stop(30.0)
    setup.trainer.wait_for_message(Group)
    setup.trainer.wait_for_message(Heartbeat, len(setup.trainer.all(Heartbeat)) + 2)
    assert (setup.trainer.all(Nack), setup.trainer.all(Bye)) == ([Nack("lease-2", "returned")], [])
    setup.trainer.send(Ack("lease-1", "accepted", setup.trainer.policy))
    setup.link.join(10)
    setup.trainer.wait_for_message(Bye)
    assert (setup.groups(), setup.events.of(LinkEnded)) == (["lease-1"], [None])


@pytest.mark.parametrize(
    ("setup", "silent", "goodbyes"),
    [({}, False, [Bye("stopping")]), ({"heartbeat_timeout_s": 0.5}, True, [])],
    indirect=["setup"],
)
def test_stopping_ends_in_time_without_an_acknowledgement(setup, caplog, silent, goodbyes):
    caplog.set_level("INFO", logger="producer")
    setup.trainer.acknowledges = False
    setup.start()
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
    assert ("the trainer has been silent for 0.5 s; waiting for it at loopback" in caplog.text) == silent
    assert "1 finished groups were not acknowledged and are lost" in caplog.text


def test_the_wait_for_a_trainer_is_visible_and_ends_at_once_when_stopped(setup, caplog, monkeypatch):
    monkeypatch.setattr("producer.link.session.REMIND_EVERY_S", 0.05)
    caplog.set_level("INFO", logger="producer")
    setup.client.online = False
    setup.link.start()
    setup.wait_for(lambda: caplog.text.count("waiting for the trainer at loopback (") >= 2)
    assert caplog.messages[0] == "waiting for the trainer at loopback"
    setup.link.stop(30.0)
    setup.link.join(10)
    assert setup.events.of(LinkEnded) == [None]


def test_another_bundle_than_its_own_ends_it_and_its_own_does_not(setup: Setup) -> None:
    """Whoever has a configuration file of its own has no bundle, and is not concerned."""
    setup.link._hello = structs.replace(setup.link._hello, bundle="a" * 64)
    setup.start()
    assert setup.trainer.all(Hello)[0].bundle == "a" * 64
    setup.trainer.send(BundleOffer("a" * 64, 1, 1))
    setup.take_leases(1)
    setup.trainer.send(BundleOffer("b" * 64, 1, 1))
    setup.link.join(10)
    [error] = setup.events.of(LinkEnded)
    assert isinstance(error, BundleChangedError)
    assert "another bundle (bbbbbbbbbbbb): starting again" in str(error)


def test_a_producer_without_a_bundle_passes_over_an_offer(setup: Setup) -> None:
    setup.start()
    setup.trainer.send(BundleOffer("b" * 64, 1, 1))
    setup.take_leases(1)
    assert setup.link.is_alive()
