"""A trainer without a model, for tests of the producer: it speaks the real protocol over any `ServerChannel`.

Every message that arrives is kept in `received`; nothing is answered but what `answers` and the switches say.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from protocol.channel.channel import ReceivedGroup, ServerChannel
from protocol.wire.messages import (
    Ack,
    BlobChunk,
    BlobMissing,
    BlobRequest,
    Bye,
    Group,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Nack,
    Policy,
    PolicyInfo,
    PolicyOffer,
    PolicyRequest,
    Reject,
    Welcome,
)

Kind = TypeVar("Kind")


class ScriptedTrainer:
    """Welcomes every producer, answers heartbeats, serves blobs and acknowledges groups, as far as the switches allow."""

    def __init__(
        self,
        channel: ServerChannel,
        policy: PolicyInfo,
        *,
        run_id: str = "run",
        session: str = "session-1",
        heartbeat_s: float = 0.1,
    ):
        self.channel = channel
        self.policy = policy
        self.run_id = run_id
        self.session = session
        self.heartbeat_s = heartbeat_s
        self.blobs: dict[str, bytes] = {}
        self.offers: dict[str, PolicyOffer] = {}  # of those that are not plain
        self.problems: list[str] = []
        self.silent = False
        self.acknowledges = True
        self.outcome: Literal["accepted", "no_signal", "stale", "duplicate"] = "accepted"
        self.wants: Callable[[str], bool] = lambda lease_id: True  # of the leases that a producer holds when it joins
        self.loses_chunk: Callable[[BlobRequest], bool] = lambda request: False
        self.received: list[Message] = []
        self.peer = b""
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "ScriptedTrainer":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def send(self, message: Message) -> bool:
        with self._lock:
            return self.channel.send(self.peer, message)

    def give(self, *messages: Message) -> None:
        """Once a producer is there."""
        self.wait_for_message(Hello)
        for message in messages:
            self.send(message)

    def publish(self, policy: PolicyInfo, blob: bytes) -> None:
        self.blobs[policy.digest] = blob
        self.policy = policy
        self.send(Policy(policy))

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in list(self.received) if isinstance(message, kind)]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s; received {self.received[-20:]}"
            assert not self._stopping, "the trainer was stopped"
            time.sleep(0.005)

    def wait_for_message(self, kind: type[Kind], count: int = 1, timeout_s: float = 60.0) -> list[Kind]:
        self.wait_for(lambda: len(self.all(kind)) >= count, timeout_s)
        return self.all(kind)

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                arrived = self.channel.poll(0.01)
            time.sleep(0.001)
            for peer, message in arrived:
                if isinstance(message, ReceivedGroup):
                    message = message.message
                if not self.silent:
                    self._answer(peer, message)
                self.received.append(message)

    def _answer(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello() if self.problems:
                self._reply(peer, Reject(self.problems))
            case Hello():
                self.peer = peer
                self._reply(peer, Welcome(self.run_id, self.session, self.policy, self.heartbeat_s))
                for lease_id in message.held:
                    if not self.wants(lease_id):
                        self._reply(peer, Nack(lease_id, "unknown_lease"))
            case Heartbeat():
                self._reply(peer, Policy(self.policy) if peer == self.peer else Bye("unknown_session"))
            case Group(lease_id) if self.acknowledges:
                self._reply(peer, Ack(lease_id, self.outcome, self.policy))
            case PolicyRequest(digest):
                known = self.offers.get(digest, PolicyOffer(digest))
                self._reply(peer, known if digest in self.blobs else BlobMissing(digest))
            case BlobRequest(digest, offset, length) if not self.loses_chunk(message):
                blob = self.blobs.get(digest)
                answer = (
                    BlobMissing(digest) if blob is None else BlobChunk(digest, offset, blob[offset : offset + length])
                )
                self._reply(peer, answer)

    def _reply(self, peer: bytes, message: Message) -> None:
        with self._lock:
            self.channel.send(peer, message)


def lease(number: int, prompt="1+1=", **changes) -> Lease:
    from protocol.wire.messages import Sampling

    values = {
        "lease_id": f"lease-{number}",
        "prompt_id": number,
        "attempt": 0,
        "prompt": prompt,
        "columns": {"answer": "2"},
        "sampling": Sampling(num_generations=4, max_completion_length=8, temperature=1.0),
        "policy_floor": 0,
        "timeout_s": 60.0,
    }
    return Lease(**(values | changes))
