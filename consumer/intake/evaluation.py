"""What the intake asks of the leases of an evaluation.

Guarantee: the intake knows no more of an evaluation than this; a run without one gives no such leases and has an answer for those
of the process before it.
"""

from collections.abc import Iterable
from typing import Protocol

from consumer.intake.sessions import ProducerSession
from consumer.publishing.policy_store import PolicyStore
from protocol.wire.messages import Ack, Group, Nack, PolicyInfo


class EvaluationDispatcher(Protocol):
    """As `consumer.evaluation.leases.EvaluationLeases` gives them."""

    @property
    def policy(self) -> PolicyInfo | None:
        """The one that is evaluated now."""

    def tick(self, store: PolicyStore, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """Gives leases of what is due. Returns the producers that cannot be reached."""

    def receive(self, session: ProducerSession, message: Group | Nack, store: PolicyStore) -> Ack | Nack | None:
        """The answer to what came of a lease of an evaluation, of this process or another; None: it needs none."""

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        """Takes back the leases of a producer, but those that it keeps, which are returned."""


class NoEvaluations:
    """The dispatcher of a run that evaluates nothing."""

    policy = None

    def tick(self, store: PolicyStore, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        return []

    def receive(self, session: ProducerSession, message: Group | Nack, store: PolicyStore) -> Ack | None:
        return Ack(message.lease_id, "duplicate", store.newest) if isinstance(message, Group) else None

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        return set()
