"""The leases of one run and the answers to them, without sockets.

Guarantee: a lease is begun once and answered once, also when it is begun under one trainer process and answered under the
next. Its answer is kept until the trainer has it: a refusal until it is sent, a group, sent again and again, until it is
settled. `held` names every lease that is worked on or whose answer is kept. How many those are is bounded by the leases
that the trainer gives; the bytes of unsettled groups are bounded by their owner, who begins nothing new while it is full.
"""

import math
from dataclasses import dataclass

from msgspec import structs

from protocol.wire.messages import Group, Nack

_RESEND_AFTER_S, _LONGEST_RESEND_S = 15.0, 240.0  # of a group that was neither settled nor lost with its connection


@dataclass
class _Kept:
    answer: Group | Nack
    num_bytes: int
    sent_at: float = -math.inf
    num_sent: int = 0  # over this connection

    @property
    def pause_s(self) -> float:
        """Doubles each time: a trainer that waits for room on its disk has the group, and cannot say so."""
        return min(_LONGEST_RESEND_S, _RESEND_AFTER_S * 2.0 ** (self.num_sent - 1))


class Outbox:
    """Belongs to the link's thread; its numbers may be read by any. With more bytes of unsettled groups than these it is
    full."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._working: set[str] = set()
        self._kept: dict[str, _Kept] = {}

    @property
    def num_groups(self) -> int:
        return sum(isinstance(kept.answer, Group) for kept in list(self._kept.values()))

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in list(self._kept.values()))

    @property
    def full(self) -> bool:
        return self.num_bytes > self._max_bytes

    @property
    def all_settled(self) -> bool:
        return not self._kept

    @property
    def num_held(self) -> int:
        return len(self._working) + len(self._kept)

    def held(self) -> list[str]:
        return sorted(self._working) + list(self._kept)

    def begin(self, lease_id: str) -> bool:
        """Note a lease; False if it is already held."""
        if lease_id in self._working or lease_id in self._kept:
            return False
        self._working.add(lease_id)
        return True

    def finish(self, answer: Group | Nack) -> bool:
        """Keep the answer to a lease. Returns False if the lease is not held any more."""
        if not self.abandon(answer.lease_id):
            return False
        self._keep(answer)
        return True

    def replace(self, answer: Nack) -> None:
        """Put this refusal in the place of a group that cannot be sent."""
        self.settle(answer.lease_id)
        self._keep(answer)

    def due(self, now: float) -> list[Group | Nack]:
        """Answers never sent over this connection, and groups sent long ago that are still not settled."""
        return [kept.answer for kept in self._kept.values() if now - kept.sent_at >= kept.pause_s]

    def note_sent(self, answer: Group | Nack, now: float) -> None:
        """Note a send. A refusal is settled by it, because nothing acknowledges refusals; the next `held` reveals a lost one."""
        if isinstance(answer, Nack):
            self.settle(answer.lease_id)
        else:
            kept = self._kept[answer.lease_id]
            kept.sent_at, kept.num_sent = now, kept.num_sent + 1

    def settle(self, lease_id: str) -> bool:
        """Forget an answer; False if there is none."""
        return self._kept.pop(lease_id, None) is not None

    def abandon(self, lease_id: str) -> bool:
        """Forget a lease that is worked on; False if there is none."""
        known = lease_id in self._working
        self._working.discard(lease_id)
        return known

    def forget_sends(self) -> None:
        """The connection is gone, and with it everything that the trainer had not settled."""
        for kept in self._kept.values():
            kept.sent_at, kept.num_sent = -math.inf, 0

    def void(self) -> int:
        """Forget every lease, because the run that gave them is another one, and return how many."""
        count = self.num_held
        self._working.clear()
        self._kept.clear()
        return count

    def _keep(self, answer: Group | Nack) -> None:
        self._kept[answer.lease_id] = _Kept(answer, num_bytes(answer))


def num_bytes(answer: Group | Nack) -> int:
    """Count the bytes of the answer's buffers, which are all of it but a few hundred bytes."""
    return sum(len(value) for value in structs.astuple(answer) if isinstance(value, bytes))
