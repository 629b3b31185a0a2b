"""What a producer says to the trainer, and when.

Guarantee: a heartbeat once per interval, every answer until the trainer has it, every request for a chunk until it is
answered. Over a new connection all of it is due at once.
"""

from collections.abc import Callable

from msgspec import structs

from producer.link.outbox import Outbox
from producer.link.trainer_source import TrainerSource
from producer.state import Counters, Workload
from protocol import __version__
from protocol.transport.channel import ClientChannel
from protocol.wire.codec import CodecError
from protocol.wire.messages import Group, Heartbeat, Hello, Nack, PolicyRequest
from protocol.wire.schemas import SINCE_MESSAGES


class Sender:
    """Belongs to the link's thread."""

    def __init__(
        self,
        channel: ClientChannel,
        outbox: Outbox,
        source: TrainerSource,
        hello: Hello,
        counters: Counters,
        workload: Callable[[], Workload],
    ) -> None:
        self._channel = channel
        self._outbox = outbox
        self._source = source
        self._hello = hello
        self._counters = counters
        self._workload = workload
        self._interval_s = 0.0
        self._heartbeat_at = 0.0

    def greet(self, run_id: str) -> bool:
        """Begins a session. Returns False if the channel has no room for the greeting."""
        held = self._outbox.held()
        return self._channel.send(structs.replace(self._hello, held=held, release=__version__, run_id=run_id))

    def start_over(self, interval_s: float) -> None:
        """For a new connection: everything that was under way is lost, and everything is due."""
        self._interval_s = interval_s
        self._heartbeat_at = float("-inf")
        self._outbox.forget_sends()
        self._source.forget_requests()

    def send_due(self, now: float) -> None:
        if now - self._heartbeat_at >= self._interval_s:
            self._heartbeat_at = now
            self._channel.send(self._heartbeat())
        for answer in self._outbox.due(now):
            self._send_answer(answer, now)
        knows_offers = self._channel.schema_version >= SINCE_MESSAGES[PolicyRequest]
        for request in self._source.due_requests(now, knows_offers=knows_offers):
            self._channel.send(request)

    def _send_answer(self, answer: Group | Nack, now: float) -> None:
        try:
            if self._channel.send(answer):
                self._outbox.note_sent(answer, now)
        except CodecError as error:  # too large: no repetition will help
            self._outbox.replace(Nack(answer.lease_id, "generation_failed", str(error)))

    def _heartbeat(self) -> Heartbeat:
        work = self._workload()
        return Heartbeat(
            policy_version=self._counters.policy_version,
            capacity=self._hello.capacity,
            held=self._outbox.held(),
            tokens_generated=self._counters.tokens,
            busy_s=work.busy_s,
            waiting=len(work.waiting_floors),
            generating=work.generating,
            scoring=work.scoring,
            unacked=self._outbox.num_groups,
            idle_s=self._counters.idle_s,
            refused_version=self._counters.refused_version,
            refusal=self._counters.refusal,
        )
