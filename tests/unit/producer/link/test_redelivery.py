"""Whatever is lost or restarted in whatever order, a lease has one fate, and the trainer's journal and the worker agree on it.

The link is driven step by step, without threads or waiting; a trainer with a journal plays the other side.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from producer.link.events import LeaseAbandoned, LinkEvent, RunBegan, SessionBegan
from producer.link.fetch import Fetcher
from producer.link.session import Link, Mailbox
from producer.metrics import Counters, Workload
from protocol.channel.channel import ReceivedGroup
from protocol.config.operation import TransportSection
from protocol.wire.messages import Ack, Bye, Group, Heartbeat, Hello, Lease, Nack, Policy, PolicyInfo, Welcome
from slipstream_extras.relays.sources import PolicySources
from tests.loopback import LoopbackServer
from tests.scripted import facts
from tests.scripted_trainer import lease

POLICY = PolicyInfo(0, "0" * 64, 0)


class Worker:
    """What generation does with the link's events, which it notices late."""

    def __init__(self) -> None:
        self.events: list[LinkEvent] = []
        self.working: dict[str, Lease] = {}
        self.accepted: set[str] = set()
        self.returned: set[str] = set()

    def __call__(self, event: LinkEvent) -> None:
        self.events.append(event)

    def notice(self, mailbox: Mailbox) -> None:
        for event in self.events:
            match event:
                case RunBegan():
                    self.working.clear()
                case SessionBegan(PolicyInfo(version)):
                    for lease_id in [each for each, lease in self.working.items() if lease.policy_floor > version]:
                        del self.working[lease_id]
                        self.returned.add(lease_id)
                        mailbox.put(Nack(lease_id, "returned"))
                case Lease(lease_id):
                    assert lease_id not in self.working
                    self.working[lease_id] = event
                    self.accepted.add(lease_id)
                case LeaseAbandoned(lease_id):
                    self.working.pop(lease_id, None)
        self.events.clear()


class Redelivery(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.server = LoopbackServer()
        self.client = self.server.connect("p")
        self.worker = Worker()
        transport = TransportSection(heartbeat_interval_s=1e-9, heartbeat_timeout_s=1e6)
        self.mailbox = Mailbox(self.client)
        self.link = Link(
            self.mailbox,
            Hello("p", facts(), 8),
            transport,
            PolicySources("p", transport),
            self.worker,
            Counters(),
            lambda: Workload((), 0, 0, 0.0),
        )
        self.run_id = self.session = 0
        self.peer: bytes | None = None
        self.leases = 0
        self.open: set[str] = set()
        self.run_of: dict[str, str] = {}  # by lease
        self.fates: dict[str, Group | Nack] = {}  # the journal
        self.produced: dict[str, Group | Nack] = {}

    # The producer

    @rule()
    def producer_steps(self) -> None:
        assert not self.link._step()

    @rule()
    def worker_notices(self) -> None:
        self.worker.notice(self.mailbox)

    @precondition(lambda self: self.worker.working)
    @rule(pick=st.integers(0, 99), refuses=st.booleans())
    def worker_finishes(self, pick: int, refuses: bool) -> None:
        lease_id = list(self.worker.working)[pick % len(self.worker.working)]
        del self.worker.working[lease_id]
        answer: Group | Nack = Group(lease_id, 0, lease_id.encode(), b"", b"", b"", b"", b"", 0.0, 0.0)
        if refuses:
            answer = Nack(lease_id, "reward_failed", lease_id)
        assert lease_id not in self.produced
        self.produced[lease_id] = answer
        self.mailbox.put(answer)

    # The trainer

    @rule(floors=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def trainer_leases(self, floors: list[int]) -> None:
        while self.peer is None:
            self.both_step(1)
        for floor in floors:
            self.leases += 1
            self.open.add(f"lease-{self.leases}")
            self.run_of[f"lease-{self.leases}"] = f"run-{self.run_id}"
            self.server.send(self.peer, lease(self.leases, policy_floor=floor))

    @rule()
    def trainer_steps(self) -> None:
        for peer, received in self.server.poll(0.0):
            message = received.message if isinstance(received, ReceivedGroup) else received
            match message:
                case Hello():
                    self.peer = peer
                    assert {self.run_of[lease_id] for lease_id in message.held} <= {message.run_id}
                    welcome = Welcome(f"run-{self.run_id}", f"session-{self.session}", POLICY, 1e-9)
                    self.server.send(peer, welcome)
                    self.check_lost(self.open - set(message.held))
                    self.open &= set(message.held)
                    for lease_id in set(message.held) - self.open - set(self.fates):
                        self.server.send(peer, Nack(lease_id, "unknown_lease"))
                case _ if peer != self.peer:
                    self.server.send(peer, Bye("unknown_session"))
                case Group(lease_id) | Nack(lease_id):
                    self.take(peer, lease_id, message)
                case Heartbeat():
                    self.server.send(peer, Policy(POLICY))

    def check_lost(self, lease_ids: set[str]) -> None:
        """A lease that did not arrive or whose refusal did not may be lost; work may not."""
        refused = {lease_id for lease_id, answer in self.produced.items() if isinstance(answer, Nack)}
        assert not (lease_ids & self.worker.accepted) - self.worker.returned - refused

    def take(self, peer: bytes, lease_id: str, answer: Group | Nack) -> None:
        if lease_id in self.open:
            self.open.remove(lease_id)
            self.fates[lease_id] = answer
        elif lease_id in self.fates:
            assert isinstance(answer, Group), "a refusal is told once"
            assert self.fates[lease_id] == answer, "a lease has one fate"
        if isinstance(answer, Group):
            known = lease_id in self.fates
            self.server.send(peer, Ack(lease_id, "duplicate", POLICY) if known else Nack(lease_id, "unknown_lease"))

    @rule(times=st.integers(1, 4))
    def both_step(self, times: int) -> None:
        for _ in range(times):
            self.producer_steps()
            self.trainer_steps()
            self.worker_notices()

    # What goes wrong

    @rule(what=st.sampled_from(["connection", "process", "process", "run"]), how_often=st.integers(0, 2))
    def something_is_lost(self, what: str, how_often: int) -> None:
        if how_often:  # mostly nothing: work must get done in between
            self.both_step(how_often)
        elif what == "connection":
            self.link._lose("lost")
        else:
            self.crash()
        if what == "run" and not how_often:
            self.run_id += 1
            self.open.clear()
            self.fates.clear()

    def crash(self) -> None:
        """What was on its way to the trainer is lost; a greeting that was, is given up after heartbeat_timeout_s."""
        self.server.poll(0.0)
        if not self.link.connected:
            self.link._reconnect()
        self.peer = None
        self.session += 1

    # How it ends

    def teardown(self) -> None:
        for _ in range(3):
            self.both_step(8)
            while self.worker.working:
                self.worker_finishes(0, False)
        self.link._outbox.forget_sends()  # as after _RESEND_AFTER_S
        self.both_step(3)
        assert self.link._outbox.held() == []
        for lease_id, fate in self.fates.items():
            assert fate == self.produced.get(lease_id, Nack(lease_id, "returned"))
        self.check_lost(self.open)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fetcher, "announce", lambda self, policy: None)
    monkeypatch.setattr("producer.link.session._TICK_S", 0.0)
    monkeypatch.setattr("producer.link.session._RECONNECT_AFTER_S", 0.0)


@pytest.mark.long
def test_a_lease_has_one_fate() -> None:
    run_state_machine_as_test(Redelivery, settings=settings(max_examples=50))
