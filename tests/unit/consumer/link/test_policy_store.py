"""What the policy store keeps, and that nothing is left of what leaves it."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from consumer.link.policy_store import PolicyStore, PublishedPolicy
from protocol.runtime.scratch import SharedMemory
from protocol.wire.adapter_blob import Anchor
from protocol.wire.messages import PolicyInfo, PolicyOffer, PolicyRequest


class Memory(SharedMemory):
    """Calls `meanwhile` once, while a file is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.meanwhile: Callable[[], None] = lambda: None

    def write(self, data: memoryview) -> Path | None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        path = super().write(data)
        meanwhile()
        return path


def policy(version: int) -> PublishedPolicy:
    data = f"adapter of v{version}".encode()
    return PublishedPolicy(version, hashlib.sha256(data).hexdigest(), data)


def test_a_policy_that_is_published_while_it_is_pinned_is_kept_once(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    store = PolicyStore(1, memory)
    memory.meanwhile = lambda: store.publish(policy(1))
    store.pin(policy(1))
    offer = store.offer(PolicyRequest(policy(1).digest))
    assert isinstance(offer, PolicyOffer)
    assert [str(file) for file in tmp_path.iterdir()] == [offer.shared_file]
    store.publish(policy(2))
    assert len(list(tmp_path.iterdir())) == 2, "v1 is pinned"
    store.unpin()
    assert len(list(tmp_path.iterdir())) == 1


def anchored(version: int, on: int) -> PublishedPolicy:
    return replace(policy(version), anchor=Anchor(policy(on).digest, policy(on).data))


def kept(store: PolicyStore) -> set[int]:
    """Return which of the first versions the store has, and check that it has the anchors of all that it offers."""
    offers = {version: store.offer(PolicyRequest(policy(version).digest)) for version in range(1, 20)}
    found = {version: offer for version, offer in offers.items() if isinstance(offer, PolicyOffer)}
    for offer in found.values():
        assert offer.anchor is None or isinstance(store.offer(PolicyRequest(offer.anchor.digest)), PolicyOffer)
    return set(found)


def test_an_anchor_is_here_as_long_as_a_policy_that_builds_on_it(tmp_path: Path) -> None:
    store = PolicyStore(2, Memory(tmp_path))
    store.publish(policy(1))
    for version in (2, 3, 4):
        store.publish(anchored(version, 1))
    assert kept(store) == {1, 3, 4}
    offer = store.offer(PolicyRequest(policy(4).digest))
    assert isinstance(offer, PolicyOffer)
    assert offer.anchor == PolicyInfo(4, policy(1).digest, len(policy(1).data))
    store.publish(policy(5))
    assert kept(store) == {1, 4, 5}
    store.publish(anchored(6, 5))
    assert kept(store) == {5, 6}, "nothing builds on v1 any more"
    assert len(list(tmp_path.iterdir())) == 2


def test_anchors_of_the_pinned_policy_and_of_the_first_one_come_with_them(tmp_path: Path) -> None:
    """As in a process that goes on: what is evaluated and what is newest build on different blobs."""
    store = PolicyStore(1, memory := Memory(tmp_path))
    store.pin(anchored(4, 1))
    memory.meanwhile = store.unpin
    store.publish(anchored(9, 8))
    assert kept(store) == {8, 9}
    memory.meanwhile = lambda: store.publish(anchored(10, 8))
    store.pin(anchored(4, 1))
    assert kept(store) == {1, 4, 8, 10}
    store.pin(anchored(3, 2))
    assert kept(store) == {2, 3, 8, 10}
    store.unpin()
    store.publish(policy(11))
    assert kept(store) == {11}
    assert len(list(tmp_path.iterdir())) == 1
