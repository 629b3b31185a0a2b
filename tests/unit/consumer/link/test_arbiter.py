"""Whoever says what and dies whenever: never both on the GPU, and no wait without an end."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from consumer.link.gpu_turns import TurnArbiter
from protocol.wire.messages import GpuTurn

HANDOVER_S = 10.0


def test_a_turn_from_the_question_to_the_hand_over() -> None:
    arbiter = TurnArbiter(HANDOVER_S, since=0.0)
    arbiter.join("p", 0.0)
    arbiter.join("q", 0.0)
    assert arbiter.turn == GpuTurn(0, "producers", HANDOVER_S)
    arbiter.ask(3.0)
    assert arbiter.turn == GpuTurn(1, "trainer", HANDOVER_S)
    arbiter.report("p", 1)
    assert not arbiter.enter(4.0)
    assert arbiter.awake() == ["q"]
    arbiter.report("q", 1)
    assert arbiter.enter(5.0)
    assert arbiter.hand_over(9.0)
    assert not arbiter.hand_over(9.0)
    assert arbiter.turn == GpuTurn(2, "producers", HANDOVER_S)
    assert arbiter.spent_s(10.0) == {"producers": 4.0, "changing": 2.0, "trainer": 4.0}


def test_what_was_said_of_another_turn_does_not_count() -> None:
    arbiter = TurnArbiter(HANDOVER_S, since=0.0)
    arbiter.join("p", 0.0)
    arbiter.ask(0.0)
    arbiter.hand_over(1.0)  # the trainer changed its mind
    arbiter.ask(2.0)
    arbiter.report("p", 1)  # which it said before it woke
    assert not arbiter.enter(2.0)
    arbiter.report("p", 3)
    assert arbiter.enter(2.0)


def test_who_does_not_leave_is_overdue_and_who_is_gone_is_not_waited_for() -> None:
    arbiter = TurnArbiter(HANDOVER_S, since=0.0)
    arbiter.join("p", 0.0)
    assert arbiter.overdue(1000.0) == []
    arbiter.ask(1000.0)
    assert arbiter.overdue(1019.9) == []
    assert arbiter.overdue(1020.0) == ["p"]
    arbiter.join("q", 1015.0)
    assert arbiter.overdue(1030.0) == ["p"], "the other one was not there when it was asked"
    arbiter.leave("p")
    assert arbiter.overdue(1030.0) == []
    assert not arbiter.enter(1030.0)
    arbiter.leave("q")
    assert arbiter.enter(1030.0)


@dataclass
class Producer:
    """As `producer.app.gpu_turns`: what it last heard, whether its engine is awake, and what it said that has not arrived."""

    heard: GpuTurn | None = None
    is_awake: bool = True
    sent: list[int] = field(default_factory=list)


NAMES = st.sampled_from("pqr")


class OneGpu(RuleBasedStateMachine):
    """Messages arrive late and in order, or are lost with their connection."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.arbiter = TurnArbiter(HANDOVER_S, since=0.0)
        self.producers: dict[str, Producer] = {}
        self.came_in_the_trainers_turn: set[str] = set()

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.leave(name)
        self.producers[name] = Producer()
        self.arbiter.join(name, self.now)
        if self.arbiter.phase == "trainer":  # nobody can keep a process from starting
            self.came_in_the_trainers_turn.add(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        """Its process ends, and the trainer notices."""
        if self.producers.pop(name, None) is not None:
            self.arbiter.leave(name)
        self.came_in_the_trainers_turn.discard(name)

    @rule(name=NAMES)
    def hears(self, name: str) -> None:
        if name in self.producers:
            self.producers[name].heard = self.arbiter.turn

    @rule(name=NAMES)
    def acts(self, name: str) -> None:
        one = self.producers.get(name)
        if one is None or one.heard is None:
            return
        if one.heard.side == "trainer":
            one.is_awake = False
            one.sent.append(one.heard.number)
            self.came_in_the_trainers_turn.discard(name)
        elif not one.is_awake:
            one.sent.append(-1)
            one.is_awake = True

    @rule(name=NAMES)
    def arrives(self, name: str) -> None:
        if name in self.producers and self.producers[name].sent:
            self.arbiter.report(name, self.producers[name].sent.pop(0))

    @rule(seconds=st.sampled_from([0.1, 1.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def asks(self) -> None:
        self.arbiter.ask(self.now)

    @rule()
    def enters(self) -> None:
        self.arbiter.enter(self.now)

    @rule()
    def hands_over(self) -> None:
        self.arbiter.hand_over(self.now)

    @invariant()
    def never_both(self) -> None:
        if self.arbiter.phase == "trainer":
            awake = {name for name, producer in self.producers.items() if producer.is_awake}
            assert awake <= self.came_in_the_trainers_turn

    @invariant()
    def every_wait_has_an_end(self) -> None:
        if self.arbiter.phase == "changing":
            assert self.arbiter.overdue(self.now + 2 * HANDOVER_S + 1.0) == self.arbiter.awake()

    @invariant()
    def no_second_is_lost(self) -> None:
        assert abs(sum(self.arbiter.spent_s(self.now).values()) - self.now) < 1e-6


OneGpu.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestOneGpu = OneGpu.TestCase
