"""Producers that come, fall silent, leave and come again under their own or another name: no lease is lost with them."""

from types import SimpleNamespace
from typing import Any

import pytest

from consumer.link import fleet
from protocol.wire.codec import encode
from protocol.wire.messages import Ack, Bye, Heartbeat
from tests.unit.consumer.link.builders import Start, answer, only
from tests.unit.replay.builders import FillableJournal


def test_a_silent_producer_is_given_up_and_its_leases_go_to_the_others(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    silent, other = trainer.producer("silent", capacity=2), trainer.producer("other", capacity=2)
    assert (len(silent.leases), len(other.leases)) == (2, 0)
    trainer.now += 6.0
    other.beat()
    assert len(trainer.intake.fleet.sessions) == 2
    trainer.now += 0.1
    other.beat()
    assert len(trainer.intake.fleet.sessions) == 1
    assert [lease.prompt_id for lease in other.leases] == [0, 1]
    assert "producer silent left (silent for 6.1 s); 2 prompts go out again" in caplog.text
    assert silent.beat() == [Bye("unknown_session")]


def test_while_the_trainer_stands_still_nobody_is_silent(
    start: Start, journal: FillableJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start()
    writer, reader = trainer.producer("writer", capacity=2), trainer.producer("reader", capacity=2)
    append = journal.append

    def slow(*arguments: Any) -> Any:
        trainer.now += 60.0
        return append(*arguments)

    trainer.now += 5.0
    with monkeypatch.context() as patched:
        patched.setattr(journal, "append", slow)
        writer.say(answer(writer.leases[0]))
    assert len(trainer.intake.fleet.sessions) == 2
    trainer.now += 1.5
    trainer.tick()
    assert len(trainer.intake.fleet.sessions) == 1, "5 s before it and 1.5 after it are more than 6"
    assert trainer.intake.fleet.num_goodbyes == 0
    assert only(reader.beat(), Bye) == Bye("unknown_session")


def test_a_producer_that_says_goodbye_frees_its_leases(start: Start) -> None:
    trainer = start()
    producer = trainer.producer()
    producer.say(Bye("stopping"))
    assert len(trainer.intake.fleet.sessions) == 0
    assert trainer.intake.fleet.num_goodbyes == 1
    assert trainer.replay.totals["failed_released"] == 2
    assert trainer.intake.describe() == "no producer is connected; start one with: rl-producer --config FILE"


def test_a_producer_that_reconnects_keeps_what_it_holds(start: Start) -> None:
    trainer = start(groups_per_step=3)
    producer = trainer.producer(capacity=3)
    held, lost, finished = producer.leases
    producer.channel.reset()
    producer.inbox.clear()
    producer.hello(3, [held.lease_id, finished.lease_id])
    assert len(trainer.intake.fleet.sessions) == 1
    assert [(lease.prompt_id, lease.attempt) for lease in producer.leases] == [(lost.prompt_id, 2)]
    assert only(producer.say(answer(finished)), Ack).outcome == "accepted"
    assert trainer.replay.totals["failed_released"] == 1


def test_a_peer_that_changes_its_name_leaves_nothing_behind(start: Start) -> None:
    trainer = start()
    producer = trainer.producer("before")
    assert len(producer.leases) == 2
    producer.name = "after"
    producer.hello()
    assert len(trainer.intake.fleet.sessions) == 1
    assert trainer.replay.depth()["leased"] == 2
    assert [lease.attempt for lease in producer.leases] == [1, 1, 2, 2]


def test_a_producer_that_cannot_be_reached_is_given_up(start: Start) -> None:
    trainer = start()
    producer = trainer.producer(capacity=0)
    trainer.channel.clients.pop(producer.channel.peer)
    trainer.channel.inbox.put(producer.channel.peer, encode(Heartbeat(0, 5, [], 0, 0.0)))
    trainer.tick()
    assert len(trainer.intake.fleet.sessions) == 0
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
    assert trainer.intake.fleet.tokens_generated == 350


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


def test_a_producer_whose_connection_ended_is_given_up_a_second_later(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()
    killed, other = trainer.producer("killed", capacity=2), trainer.producer("other", capacity=2)
    trainer.channel.clients.pop(killed.channel.peer)
    trainer.channel.ended.append(killed.channel.peer)
    trainer.tick()
    trainer.now += 0.9
    trainer.tick()
    assert (len(trainer.intake.fleet.sessions), len(other.leases)) == (2, 0)
    trainer.now += 0.15
    trainer.tick()
    trainer.now += 0.3  # the prompts wait for their first retry
    trainer.tick()
    assert [lease.prompt_id for lease in other.leases] == [0, 1]
    assert "producer killed left (its connection ended); 2 prompts go out again" in caplog.text


def test_a_producer_that_connects_again_at_once_keeps_its_leases(start: Start) -> None:
    trainer = start()
    producer = trainer.producer(capacity=2)
    trainer.channel.ended += [producer.channel.peer, b"nobody"]
    trainer.tick()
    trainer.now += 1.5
    trainer.tick()
    assert len(trainer.intake.fleet.sessions) == 1
    assert trainer.replay.totals["failed_released"] == 0
    assert len(producer.beat()) == 1, "it is answered as before"


def test_many_producers_are_described_by_a_few(start: Start) -> None:
    trainer = start()
    for number in range(11):
        trainer.producer(f"p{number}", capacity=0)
    words = trainer.intake.describe()
    assert words.startswith("11 producer(s), ")
    assert words.count("no heartbeat yet") == 8
    assert words.endswith("; and 3 more producers")


def test_names_of_past_producers_do_not_pile_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_MAX_REMEMBERED", 4)
    trainer = start()
    for number in range(20):
        producer = trainer.producer(f"p{number}", capacity=0)
        producer.beat()
        producer.say(Heartbeat(0, 0, [], 10, 0.0, refused_version=3, refusal="no"), Bye("stopping"))
    found = trainer.intake.fleet
    assert (len(found._tokens_seen), len(found._refused), len(found._peers)) == (4, 4, 0)
    assert found.tokens_generated == 200
