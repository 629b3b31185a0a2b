"""Turns on a shared GPU, as the intake sees them: who takes part, who is told, who is refused."""

import pytest

from consumer.link.gpu_turns import GpuTurns
from protocol.wire.messages import GpuTurn, Heartbeat, Hello, Policy, Reject, Welcome
from tests.scripted import facts
from tests.unit.consumer.link.builders import Producer, Start, Trainer, only


def greet(trainer: Trainer, name: str, **more: object) -> Producer:
    producer = Producer(trainer, trainer.channel.connect(name), name)
    producer.say(Hello(name, facts(), 4, release="1", **more))  # type: ignore[arg-type]
    return producer


def turns_told(producer: Producer) -> list[GpuTurn | None]:
    return [message.turn for message in producer.all(Policy)]


def test_only_who_is_on_the_gpu_is_told_of_turns_and_waited_for(start: Start) -> None:
    turns = GpuTurns((), 10.0)
    (gpu,), first = turns.ids, turns.turn.number
    trainer = start(turns=turns)
    beside = greet(trainer, "beside", gpus=(gpu, "another"), takes_turns=True)
    elsewhere = greet(trainer, "elsewhere", gpus=("another",))
    assert beside.beat()[-1].turn == GpuTurn(first, "producers", 10.0)
    turns._arbiter.ask(0.0)
    trainer.tick()
    assert turns_told(beside)[-1] == GpuTurn(first + 1, "trainer", 10.0)
    assert turns_told(elsewhere)[-1] is None
    assert turns._arbiter.awake() == ["beside"]
    beside.say(Heartbeat(0, 4, [], 0, 0.0, asleep_in=first + 1))
    assert "beside (policy v0, asleep in the trainer's turn" in trainer.intake.describe()
    assert turns._arbiter.enter(0.0)
    turns._arbiter.hand_over(1.0)
    trainer.tick()
    assert turns_told(beside)[-1] == GpuTurn(first + 2, "producers", 10.0)


def test_a_producer_that_is_lost_does_not_keep_the_gpu(start: Start) -> None:
    turns = GpuTurns((), 10.0)
    trainer = start(turns=turns)
    greet(trainer, "p", gpus=tuple(turns.ids), takes_turns=True)
    turns._arbiter.ask(0.0)
    assert not turns._arbiter.enter(0.0)
    trainer.now += 10.0  # longer than heartbeat_timeout_s
    trainer.tick()
    assert turns._arbiter.enter(0.0)


def test_one_that_greets_again_is_waited_for_all_the_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = GpuTurns((), 10.0)
    trainer = start(turns=turns)
    greet(trainer, "p", gpus=tuple(turns.ids), takes_turns=True)
    turns._arbiter.ask(0.0)
    entered: list[bool] = []

    def released(*_: object, **__: object) -> list[object]:  # as soon as the session before has ended
        entered.append(turns._arbiter.enter(0.0))
        return []

    monkeypatch.setattr(trainer.replay, "release", released)
    again = Producer(trainer, trainer.channel.connect("another connection"), "p")
    again.say(Hello("p", facts(), 4, release="1", gpus=tuple(turns.ids), takes_turns=True))
    assert entered == [False]
    assert turns._arbiter.awake() == ["p"]


def test_who_would_stay_on_the_gpu_is_refused_with_the_reason(start: Start) -> None:
    turns = GpuTurns((), 10.0)
    trainer = start(turns=turns)
    [unnamed] = only(trainer.producer("unnamed").inbox, Reject).problems
    assert "does not name its GPU" in unnamed
    [stays] = only(greet(trainer, "stays", gpus=tuple(turns.ids)).inbox, Reject).problems
    assert "does not leave it for the trainer's turns: set pipeline.gpu=turns" in stays
    [alone] = only(greet(start(), "alone", gpus=("gpu",), takes_turns=True).inbox, Reject).problems
    assert "and this trainer does not: give both one file" in alone
    assert greet(start(), "own", gpus=("gpu",)).all(Welcome)
