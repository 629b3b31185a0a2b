"""What is announced is handed over once, what is evaluated is answered, and what serves both is downloaded once."""

import hashlib

import pytest

from producer.policies.downloads import Done, PolicyDownloads
from producer.policies.loader import DownloadedPolicy
from protocol.wire.messages import LARGEST_POLICY_BYTES, PolicyInfo
from tests.unit.producer.link.linked import Events

ROOM = 10**9


def policy(version: int, num_bytes: int = 10) -> PolicyInfo:
    return PolicyInfo(version, hashlib.sha256(b"%d" % version).hexdigest(), num_bytes)


class Source:
    """A source that answers when the test says so."""

    def __init__(self) -> None:
        self.fetching: dict[str, tuple[PolicyInfo, Done]] = {}

    def fetch(self, policy: PolicyInfo, done: Done) -> None:
        assert policy.digest not in self.fetching
        self.fetching[policy.digest] = (policy, done)

    def cancel(self, digest: str) -> None:
        del self.fetching[digest]

    def answer(self, policy: PolicyInfo, blob: bytes | None = b"bytes") -> None:
        fetched, done = self.fetching.pop(policy.digest)
        done(None if blob is None else DownloadedPolicy(fetched, blob, 0.0))

    @property
    def versions(self) -> list[int]:
        return [policy.version for policy, _ in self.fetching.values()]


class Setup:
    def __init__(self) -> None:
        self.source, self.events = Source(), Events()
        self.downloads = PolicyDownloads(self.source, self.events, lambda: ROOM)  # type: ignore[arg-type]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_every_announced_policy_is_handed_over_once_unless_superseded(setup):
    for version in (1, 2, 2):
        setup.downloads.announce(policy(version))
    assert setup.source.versions == [2]
    setup.source.answer(policy(2))
    setup.downloads.announce(policy(2))
    assert (setup.events.blobs, setup.source.versions) == ([(2, b"bytes")], [])


def test_one_that_is_evaluated_is_fetched_beside_the_newest_and_again_when_it_is_asked_for_again(setup):
    setup.downloads.announce(policy(2))
    for _ in range(2):
        setup.downloads.request(policy(1))
    setup.downloads.announce(policy(3))
    assert setup.source.versions == [1, 3]
    setup.source.answer(policy(1))
    setup.downloads.request(policy(1))
    setup.source.answer(policy(1), None)
    setup.source.answer(policy(3))
    assert setup.events.fetches == [(1, b"bytes"), (1, None)]
    assert setup.events.blobs == [(3, b"bytes")]


def test_what_serves_both_purposes_is_downloaded_once_and_cancelled_only_for_both(setup):
    setup.downloads.announce(policy(1))
    same = PolicyInfo(7, policy(1).digest, 10)  # another version with equal weights
    setup.downloads.request(same)
    assert setup.source.versions == [1]
    setup.source.answer(policy(1))
    assert setup.events.blobs == [(1, b"bytes")]
    assert setup.events.of("fetched") == [(same, DownloadedPolicy(same, b"bytes", 0.0))]
    setup.downloads.announce(policy(2))
    setup.downloads.request(policy(2))
    setup.downloads.announce(policy(3))
    assert setup.source.versions == [2, 3]
    setup.downloads.request(policy(4))
    assert setup.source.versions == [3, 4]


@pytest.mark.parametrize("happens", ["the source lacks it", "another trainer process"])
def test_an_announced_policy_is_fetched_again_when_it_is_announced_again_after(setup, happens):
    setup.downloads.announce(policy(1))
    if happens == "the source lacks it":
        setup.source.answer(policy(1), None)
    else:
        setup.downloads.forget()
    assert (setup.source.versions, setup.events.blobs) == ([], [])
    setup.downloads.announce(policy(1))
    assert setup.source.versions == [1]


def test_what_could_not_be_taken_is_downloaded_again_only_if_it_is_still_the_newest(setup):
    setup.downloads.announce(policy(1))
    setup.source.answer(policy(1))
    setup.downloads.announce(policy(2))
    setup.downloads.forget_announcement(policy(1))
    setup.downloads.announce(policy(2))
    assert (setup.source.versions, setup.events.blobs) == ([2], [(1, b"bytes")])
    setup.source.answer(policy(2))
    setup.downloads.forget_announcement(policy(2))
    assert setup.source.versions == [], "it may not be the newest any more"
    setup.downloads.announce(policy(2))
    assert setup.source.versions == [2]


def test_a_policy_that_does_not_fit_the_memory_is_refused_once_before_any_of_it_is_taken(setup):
    huge = policy(1, LARGEST_POLICY_BYTES)
    for _ in range(2):
        setup.downloads.announce(huge)
    assert setup.events.of("policy_refused") == [
        (
            huge,
            f"it is {LARGEST_POLICY_BYTES} bytes large, and taking it needs twice that: this host has 1000000000 bytes of "
            "memory free. Give it more, or train a smaller adapter (lora.r)",
        )
    ]
    setup.downloads.free_memory = lambda: 3 * LARGEST_POLICY_BYTES
    setup.downloads.announce(huge)
    assert setup.source.versions == [], "refused already, and the registry says when it is tried again"
    setup.downloads.free_memory = lambda: ROOM
    setup.downloads.request(huge)
    assert (setup.events.of("fetched"), setup.source.versions) == ([(huge, None)], [])
    setup.downloads.announce(policy(2, ROOM // 2 + 1))
    assert len(setup.events.of("policy_refused")) == 2
    setup.downloads.announce(policy(3, ROOM // 2))
    assert setup.source.versions == [3]
