"""What the policy store keeps, and that nothing is left of what leaves it."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from consumer.link.policy_store import PolicyStore, PublishedPolicy
from protocol.runtime.scratch import SharedMemory
from protocol.wire.messages import PolicyOffer, PolicyRequest


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
