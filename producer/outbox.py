"""The leases of one session and the answers to them, without sockets.

Guarantee: a lease is begun once and answered once; its group is kept, and comes due again, until the trainer settles it.
`held` names every lease that is still worked on or whose group is not settled.
"""

from protocol.messages import Group, Nack

_RESEND_AFTER_S = 15.0  # a group that was neither settled nor lost with its connection


class Outbox:
    """Belongs to the link's thread."""

    def __init__(self) -> None:
        self._working: set[str] = set()
        self._finished: dict[str, Group] = {}
        self._sent_at: dict[str, float] = {}

    @property
    def all_settled(self) -> bool:
        """Whether no finished group waits for the trainer."""
        return not self._finished

    def held(self) -> list[str]:
        return sorted(self._working) + list(self._finished)

    def begin(self, lease_id: str) -> bool:
        """Notes a lease; False if it is already held."""
        if lease_id in self._working or lease_id in self._finished:
            return False
        self._working.add(lease_id)
        return True

    def finish(self, answer: Group | Nack) -> bool:
        """Takes the answer to a lease, and keeps it if it is a group; False if nobody waits for it any more."""
        if answer.lease_id not in self._working:
            return False
        self._working.remove(answer.lease_id)
        if isinstance(answer, Group):
            self._finished[answer.lease_id] = answer
        return True

    def due(self, now: float) -> list[Group]:
        """Groups never sent over this connection, or sent long ago without an answer."""
        return [
            group
            for lease_id, group in self._finished.items()
            if now - self._sent_at.get(lease_id, float("-inf")) >= _RESEND_AFTER_S
        ]

    def note_sent(self, lease_id: str, now: float) -> None:
        self._sent_at[lease_id] = now

    def settle(self, lease_id: str) -> bool:
        """Forgets a finished group; False if there is none."""
        self._sent_at.pop(lease_id, None)
        return self._finished.pop(lease_id, None) is not None

    def abandon(self, lease_id: str) -> bool:
        """Forgets a lease that is worked on; False if there is none."""
        known = lease_id in self._working
        self._working.discard(lease_id)
        return known

    def forget_sends(self) -> None:
        """The connection is gone, and with it everything that the trainer had not answered."""
        self._sent_at.clear()

    def void(self) -> int:
        """Forgets every lease, because the trainer process that gave them is gone; returns how many."""
        count = len(self._working) + len(self._finished)
        self._working.clear()
        self._finished.clear()
        self._sent_at.clear()
        return count
