"""What the intake asks of the leases of an evaluation.

Guarantee: the intake knows no more of an evaluation than this, so a run without one has nothing of it.
"""

from collections.abc import Iterable
from typing import Protocol

from consumer.intake.sessions import ProducerSession
from consumer.publishing.policy_store import PolicyShelf
from protocol.wire.messages import Group, Nack, PolicyInfo


class EvaluationLeases(Protocol):
    """As `consumer.evaluation.leases.EvaluationDesk` gives them."""

    @property
    def policy(self) -> PolicyInfo | None:
        """The one that is evaluated now."""

    def tick(self, shelf: PolicyShelf, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """Gives leases of what is due. Returns the producers that cannot be reached."""

    def receive(self, peer: bytes, session: ProducerSession, message: Group | Nack, shelf: PolicyShelf) -> None:
        """What came of a lease of an evaluation, of this process or another."""

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        """Takes back the leases of a producer, but those that it keeps, which are returned."""
