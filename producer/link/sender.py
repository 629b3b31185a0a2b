"""What a producer says to the trainer, and when.

Guarantee: a heartbeat once per interval, and at once when the engine sleeps or is about to wake; every answer until the trainer
has it, every request for a chunk until it is answered. Over a new connection all of it is due at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from producer.link.outbox import Outbox
from producer.link.trainer_source import TrainerSource
from producer.state import Counters, Workload
from protocol import __version__
from protocol.channel.channel import ClientChannel
from protocol.wire.codec import CodecError
from protocol.wire.messages import Group, Heartbeat, Hello, Nack


@dataclass
class Sender:
    """Belongs to the link's thread."""

    channel: ClientChannel
    outbox: Outbox
    source: TrainerSource
    hello: Hello
    counters: Counters
    workload: Callable[[], Workload]
    _interval_s: float = 0.0
    _heartbeat_at: float = 0.0
    _said_asleep_in: int = -1

    def greet(self, run_id: str) -> bool:
        """Begins a session. Returns False if the channel has no room for the greeting."""
        held = self.outbox.held()
        return self.channel.send(structs.replace(self.hello, held=held, release=__version__, run_id=run_id))

    def start_over(self, interval_s: float) -> None:
        """For a new connection: everything that was under way is lost, and everything is due."""
        self._interval_s = interval_s
        self._heartbeat_at = float("-inf")
        self.outbox.forget_sends()
        self.source.forget_requests()

    def send_due(self, now: float) -> None:
        if now - self._heartbeat_at >= self._interval_s or self.counters.asleep_in != self._said_asleep_in:
            self._heartbeat_at, self._said_asleep_in = now, self.counters.asleep_in
            self.channel.send(self._heartbeat())
        for answer in self.outbox.due(now):
            self._send_answer(answer, now)
        for request in self.source.due_requests(now):
            self.channel.send(request)

    def _send_answer(self, answer: Group | Nack, now: float) -> None:
        try:
            if self.channel.send(answer):
                self.outbox.note_sent(answer, now)
        except CodecError as error:  # too large: no repetition will help
            self.outbox.replace(Nack(answer.lease_id, "generation_failed", str(error)))

    def _heartbeat(self) -> Heartbeat:
        work = self.workload()
        return Heartbeat(
            policy_version=self.counters.policy_version,
            capacity=self.hello.capacity if work.takes_leases else 0,
            held=self.outbox.held(),
            tokens_generated=self.counters.tokens,
            busy_s=work.busy_s,
            waiting=len(work.waiting_floors),
            generating=work.generating,
            scoring=work.scoring,
            unacked=self.outbox.num_groups,
            idle_s=self.counters.idle_s,
            refused_version=self.counters.refused_version,
            refusal=self.counters.refusal,
            relay=self.source.neighbours.relay_endpoint,
            asleep_in=self._said_asleep_in,
        )
