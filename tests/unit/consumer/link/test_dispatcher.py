"""Who gets the next lease, and what happens to a prompt or a producer that cannot get it."""

import pytest

from consumer.link.dispatcher import LeaseDispatcher
from consumer.link.sessions import ProducerSession
from consumer.prompts.completion_limit import CompletionLimit
from protocol.wire.codec import encode
from protocol.wire.messages import Heartbeat, Lease
from replay.buffer import RolloutBuffer
from replay.journal.retention import DiskGuard
from tests.unit.consumer.builders import fill, live_buffer
from tests.unit.consumer.link.builders import SAMPLING, Prompts
from tests.unit.replay.builders import FillableJournal, reroll_rules


class Channel:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Lease]] = []
        self.gone: set[bytes] = set()
        self.wakes = 0

    def send(self, peer: bytes, message: Lease) -> bool:
        encode(message)
        if peer in self.gone:
            return False
        self.sent.append((peer, message))
        return True

    def wake(self) -> None:
        self.wakes += 1

    def prompts_of(self, peer: bytes) -> list[int]:
        return [lease.prompt_id for to, lease in self.sent if to == peer]


class Counter:
    """A lease dispatcher and what is around it."""

    def __init__(self, replay: RolloutBuffer, disk: DiskGuard) -> None:
        self.channel, self.prompts, self.replay = Channel(), Prompts(), replay
        self.problems: list[str] = []
        self.now = 0.0
        self.dispatcher = LeaseDispatcher(
            self.channel, replay, self.prompts, disk, SAMPLING, 60.0, lambda _, text: self.problems.append(text),
            lambda: self.now,
        )  # fmt: skip
        self.producers: dict[bytes, ProducerSession] = {}

    def join(self, name: str, capacity: int) -> ProducerSession:
        self.producers[name.encode()] = session = ProducerSession(name, capacity, 0.0)
        self.dispatcher.requeue(name.encode(), session)
        return session

    def give(self, now: float = 100.0) -> tuple[list[str], list[bytes]]:
        self.problems.clear()
        lost = self.dispatcher.give(self.producers, now)
        return self.problems[:], lost


@pytest.fixture
def counter(journal: FillableJournal, disk: DiskGuard) -> Counter:
    return Counter(live_buffer(journal, groups_per_step=1000), disk)


def test_a_lease_says_everything_that_its_producer_needs(counter: Counter) -> None:
    session = counter.join("p", 1)
    assert counter.give() == ([], [])
    assert counter.channel.sent == [(b"p", Lease("0-0-0-1-s", 0, 1, "0", {"answer": 1}, SAMPLING, 0, 60.0))]
    assert session.leases == {"0-0-0-1-s"} == counter.replay.leased_to("p")
    assert counter.replay.expire(160.0)[0].lease_id == "0-0-0-1-s", "its deadline is counted from now"


def test_a_row_has_a_limit_of_its_own_and_a_wrong_one_fails_alone(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Prompts, "__getitem__", lambda _, prompt_id: (str(prompt_id), {"limit": (3, 99, "no")[prompt_id % 3]})
    )
    counter.dispatcher.limit = CompletionLimit("limit", SAMPLING.max_completion_length)
    counter.join("p", 2)
    problems, _ = counter.give()
    limits = {lease.prompt_id: lease.sampling.max_completion_length for _, lease in counter.channel.sent}
    assert limits == {0: 3, 1: SAMPLING.max_completion_length}
    assert problems == []
    counter.join("q", 1)
    problems, _ = counter.give()
    assert "'limit' has 'no'" in problems[0]


def test_the_producer_with_the_most_room_for_its_size_is_next(counter: Counter) -> None:
    small, large = counter.join("small", 2), counter.join("large", 5)
    large.leases = {"an older one"}
    counter.give()
    assert counter.channel.prompts_of(b"large") == [1, 2, 4, 5]
    assert counter.channel.prompts_of(b"small") == [0, 3]
    assert (small.room, large.room) == (0, 0)


def test_no_more_leases_than_room_and_than_the_staleness_budget(journal: FillableJournal, disk: DiskGuard) -> None:
    counter = Counter(live_buffer(journal, groups_per_step=3), disk)
    counter.join("p", 2)
    counter.join("over", 0)
    counter.give()
    assert counter.replay.depth()["leased"] == 2
    counter.join("q", 64)
    counter.give()
    assert counter.replay.depth()["leased"] == 3
    assert counter.channel.wakes == 0, "there is nothing more to give"


def test_a_great_many_are_given_in_turns_between_which_the_thread_looks_at_what_arrived(counter: Counter) -> None:
    counter.join("p", 600)
    given = []
    for _ in range(3):
        counter.give()
        given.append((len(counter.channel.sent), counter.channel.wakes))
    assert given == [(256, 1), (512, 2), (600, 2)]


def test_prompts_that_take_long_to_read_do_not_keep_the_thread_from_what_arrived(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(prompts: Prompts, prompt_id: int) -> tuple[str, dict[str, int]]:
        counter.now += 0.04
        return str(prompt_id), {}

    monkeypatch.setattr(Prompts, "__getitem__", slow)
    counter.join("p", 5)
    given = []
    for _ in range(3):
        counter.give()
        given.append((len(counter.channel.sent), counter.channel.wakes))
    assert given == [(2, 1), (4, 2), (5, 2)]


def test_a_prompt_that_cannot_be_sent_fails_alone(counter: Counter, journal: FillableJournal) -> None:
    counter.join("p", 3)
    counter.prompts.bad = {0, 2}
    assert counter.give() == (["row 0 has no usable prompt", "row 2 has no usable prompt"], [])
    assert counter.channel.prompts_of(b"p") == [1, 3, 4]
    assert counter.replay.totals["failed_bad_prompt"] == counter.replay.totals["dead_letters"] == 2
    assert journal.query("SELECT prompt_id, failure, reason, detail FROM dead_letters") == [
        (0, "data", "bad_prompt", "row 0 has no usable prompt"),
        (2, "data", "bad_prompt", "row 2 has no usable prompt"),
    ]


def test_a_column_that_cannot_travel_is_a_bad_prompt(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer.link.sessions._LEASES_PER_TICK", 3)
    counter.join("p", 1)
    counter.prompts.columns = {"image": object()}
    problems, lost = counter.give()
    assert (set(problems), lost) == ({"cannot encode Lease: Encoding objects of type object is unsupported"}, [])
    assert counter.replay.totals["failed_bad_prompt"] == len(problems) == 3, "then the thread looks at what arrived"


def test_a_bad_prompt_that_the_full_disk_cannot_bury_is_tried_again(counter: Counter, journal: FillableJournal) -> None:
    session = counter.join("p", 1)
    counter.prompts.bad = {0}
    journal.full = True
    assert counter.give() == (["row 0 has no usable prompt"], [])
    assert (session.leases, counter.replay.depth()["leased"]) == (set(), 0)
    journal.full = False
    assert counter.give() == (["row 0 has no usable prompt"], [])
    assert counter.channel.prompts_of(b"p") == [1]
    assert counter.replay.totals["dead_letters"] == 1


def test_a_producer_that_cannot_be_reached_is_named_once_and_the_others_get_theirs(counter: Counter) -> None:
    counter.join("gone", 5)
    counter.join("here", 3)
    counter.channel.gone = {b"gone"}
    assert counter.give() == ([], [b"gone"])
    assert counter.channel.prompts_of(b"here") == [1, 2, 3]
    assert counter.replay.leased_to("gone") == {"0-0-0-1-s"}, "for the caller to release"


def test_the_lease_of_a_prompt_that_comes_back_wants_a_newer_policy(journal: FillableJournal, disk: DiskGuard) -> None:
    rules = reroll_rules(delay_versions=2, max_attempts=1)
    counter = Counter(live_buffer(journal, groups_per_step=4, max_staleness=9, rules=rules), disk)
    fill(counter.replay, 0, dull=1)
    counter.join("p", 4)
    counter.give()
    assert counter.channel.prompts_of(b"p") == [1, 2, 3, 4]
    counter.replay.published(2)
    counter.join("q", 1)
    counter.give()
    _, lease = counter.channel.sent[-1]
    assert (lease.lease_id, lease.prompt_id, lease.attempt, lease.policy_floor) == ("0-0-1-1-s", 0, 1, 2)


def test_a_prompt_that_wants_a_newer_policy_is_not_given_to_a_producer_that_refuses_it(
    journal: FillableJournal, disk: DiskGuard
) -> None:
    """The producer would hand the prompt back for ever, in place of a prompt that it could answer."""
    rules = reroll_rules(delay_versions=2, max_attempts=1)
    counter = Counter(live_buffer(journal, groups_per_step=4, max_staleness=9, rules=rules), disk)
    fill(counter.replay, 0, dull=1)
    producer = counter.join("p", 4)
    counter.give()
    counter.replay.published(2)
    producer.heartbeat = Heartbeat(0, 5, [], 0, 0.0, refused_version=2, refusal="not it", num_refused=2)
    producer.capacity = 5
    counter.dispatcher.requeue(b"p", producer)
    counter.give()
    assert [(lease.prompt_id, lease.policy_floor) for _, lease in counter.channel.sent[4:]] == [(5, 0)]
    counter.join("q", 1)
    counter.give()
    assert [(lease.prompt_id, lease.policy_floor) for _, lease in counter.channel.sent[5:]] == [(0, 2)]
