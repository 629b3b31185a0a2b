"""What the intake asks of the leases of an evaluation, and all that there is of them in a run that evaluates nothing."""

from collections.abc import Iterable

from consumer.intake.sessions import ProducerSession
from consumer.publishing.policy_store import PolicyStore
from protocol.wire.messages import Ack, Group, Nack, PolicyInfo


class EvaluationDispatcher:
    """Gives no leases, and has an answer for those of the process before."""

    def __init__(self, store: PolicyStore) -> None:
        self.store = store

    @property
    def policy(self) -> PolicyInfo | None:
        """The one that is evaluated now."""
        return None

    def tick(self, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """Gives leases of what is due. Returns the producers that cannot be reached."""
        return []

    def receive(self, session: ProducerSession, message: Group | Nack) -> Ack | Nack | None:
        """The answer to what came of a lease of an evaluation, of this process or another; None: it needs none."""
        return Ack(message.lease_id, "duplicate", self.store.newest) if isinstance(message, Group) else None

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        """Takes back the leases of a producer, but those that it keeps, which are returned."""
        return set()
