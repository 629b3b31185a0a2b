"""Versions leave in order while the main thread goes on; what goes wrong on the way ends the run."""

import threading

import pytest

from consumer.link import publisher as publisher_module
from consumer.link.policy_store import PublishedPolicy
from consumer.link.publisher import Publisher
from consumer.waiting import StopRequested, ThreadErrors, WaitPolicy
from tests.unit.consumer.snapshots import snapshot


class Setup:
    """A publisher whose versions wait at the gate."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.published: list[tuple[int, int, bytes]] = []
        self.refusals = 0
        self.stopping = False
        self.errors = ThreadErrors()
        waits = WaitPolicy(check=self.check, say=print, stall_timeout_s=60.0)
        self.publisher = Publisher(self.publish, waits, lambda: "nobody", self.errors)

    def check(self) -> None:
        if self.stopping:
            raise StopRequested

    def publish(self, step: int, policy: PublishedPolicy) -> bool:
        self.gate.acquire()
        if self.refusals:
            self.refusals -= 1
            return False
        if bytes(policy.data) == b"bad":
            raise OSError("no weights")
        self.published.append((step, policy.version, bytes(policy.data)))
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(publisher_module, "_POLL_S", 0.01)


@pytest.fixture
def setup():
    made = Setup()
    yield made
    made.gate.release(100)
    made.publisher.close()


def test_the_caller_waits_only_for_the_third(setup):
    setup.stopping = True  # or the waits below would be for ever
    setup.publisher.submit(0, 0, snapshot(b"a"))
    setup.publisher.submit(2, 1, snapshot(b"b"))
    with pytest.raises(StopRequested):
        setup.publisher.submit(4, 2, snapshot(b"c"))
    setup.gate.release(100)
    setup.publisher.submit(4, 2, snapshot(b"c"))
    setup.publisher.flush()
    assert setup.published == [(0, 0, b"a"), (2, 1, b"b"), (4, 2, b"c")]


def test_what_is_not_possible_now_is_tried_again_and_keeps_its_place(setup):
    setup.refusals = 1
    setup.gate.release(100)
    setup.publisher.submit(0, 0, snapshot(b"a"))
    setup.publisher.submit(1, 1, snapshot(b"b"))
    setup.publisher.flush()
    assert [version for _, version, _ in setup.published] == [0, 1]


def test_an_error_is_raised_by_whatever_comes_next(setup):
    setup.gate.release(100)
    setup.publisher.submit(0, 0, snapshot(b"bad"))
    with pytest.raises(OSError, match="no weights"):
        setup.publisher.flush()
    with pytest.raises(OSError, match="no weights"):
        setup.publisher.submit(1, 1, snapshot(b"b"))
    with pytest.raises(OSError, match="no weights"):
        setup.errors.check()
    assert setup.published == []


def test_closing_publishes_what_is_left_unless_it_is_not_possible_now(setup):
    setup.publisher.submit(0, 0, snapshot(b"a"))
    setup.publisher.submit(1, 1, snapshot(b"b"))
    setup.gate.release(100)
    setup.publisher.close()
    assert [version for _, version, _ in setup.published] == [0, 1]


def test_closing_gives_up_what_waits_for_room():
    setup = Setup()
    setup.refusals = 1000
    setup.gate.release(100)
    setup.publisher.submit(0, 0, snapshot(b"a"))
    setup.publisher.close()
    assert setup.published == []
