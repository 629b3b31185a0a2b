"""Policies over the link: announced, offered, downloaded, evaluated, lost."""

import pytest

from producer.link.events import EvaluationNoted
from producer.link.session import TakeAgain
from protocol.runtime import scratch as shared_memory_module
from protocol.runtime.scratch import shared_memory
from protocol.wire.messages import BlobRequest, Bye, Heartbeat, Hello, Policy, PolicyOffer
from tests.unit.producer.link.linked import policy


def test_the_policy_is_downloaded_in_chunks_and_handed_over_once(setup):
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    setup.trainer.wait_for_message(Heartbeat, 3)
    assert setup.events.blobs == [(0, setup.blob)]
    assert [r.offset for r in setup.trainer.all(BlobRequest)] == list(range(0, 5120, 1024))
    (hello,) = setup.trainer.all(Hello)
    assert (hello.producer, hello.capacity, hello.held, hello.swap_mode) == ("p", 8, [], "merged")
    assert hello.run_id == "", "it has worked for none"


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
    setup.wait_for(lambda: evaluated in setup.events.of(EvaluationNoted))
    setup.wait_for(lambda: setup.events.of(EvaluationNoted)[-1] is None)


def test_an_older_policy_is_fetched_beside_the_newest_once_or_is_known_to_be_gone(setup):
    older, gone = b"older" * 1000, policy(1, b"gone")
    setup.trainer.blobs[policy(2, older).digest] = older
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    for _ in range(3):
        setup.mailbox.put(policy(2, older))
    setup.wait_for(lambda: setup.events.fetches)
    setup.mailbox.put(gone)
    setup.wait_for(lambda: len(setup.events.fetches) == 2)
    assert setup.events.fetches == [(2, older), (1, None)]
    assert setup.events.blobs == [(0, setup.blob)]


def test_a_policy_that_could_not_be_taken_is_handed_over_again_when_it_is_wanted_again(setup):
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    setup.mailbox.put(TakeAgain(setup.trainer.policy))
    setup.wait_for(lambda: len(setup.events.blobs) == 2)
    assert setup.events.blobs == [(0, setup.blob)] * 2


def test_a_lost_announcement_heals_with_the_next_heartbeat(setup):
    setup.start()
    setup.wait_for(lambda: setup.events.blobs)
    setup.trainer.blobs[policy(1, b"x").digest] = b"x"
    setup.trainer.policy = policy(1, b"x")  # never announced on its own
    setup.wait_for(lambda: len(setup.events.blobs) == 2)
    assert setup.events.blobs[1] == (1, b"x")


def test_what_was_asked_for_over_a_lost_connection_is_asked_for_again(setup, monkeypatch):
    monkeypatch.setattr("producer.link.chunks._REPEAT_AFTER_S", 1e6)
    setup.trainer.loses_chunk = lambda request: request.offset >= 1024
    setup.start()
    setup.trainer.wait_for_message(BlobRequest, 4)
    setup.trainer.loses_chunk = lambda request: False
    setup.trainer.send(Bye("unknown_session"))
    setup.wait_for(lambda: setup.events.blobs == [(0, setup.blob)])
    assert [request.offset for request in setup.trainer.all(BlobRequest)].count(0) == 1, "it had arrived"
