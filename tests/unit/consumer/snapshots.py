"""A policy as the publisher gets it, made of bytes."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from consumer.link.policy_store import PublishedPolicy


class BytesSnapshot(NamedTuple):
    data: bytes
    release: Callable[[], None] = lambda: None

    def published(self, version: int) -> PublishedPolicy:
        return PublishedPolicy(version, hashlib.sha256(self.data).hexdigest(), self.data, release=self.release)


snapshot = BytesSnapshot
