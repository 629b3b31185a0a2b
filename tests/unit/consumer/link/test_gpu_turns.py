"""The trainer takes the GPU when nobody else is on it, says whom it waits for, and gives it back whatever happens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from consumer.link import gpu_turns as turns_module
from consumer.link.gpu_turns import PHASES, GpuTurns
from consumer.report.metrics import watch_turns
from consumer.waiting import StopRequested, WaitPolicy
from protocol.errors import DeviceError
from protocol.gpu import reservation as tenants
from protocol.gpu.reservation import tenancy
from protocol.wire.messages import GpuTurn

GIB = 2**30


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_POLL_S", 0.001)


class Moves:
    """In the place of `DeviceMoves`."""

    num_bytes = 3 * GIB

    def __init__(self) -> None:
        self.free, self.moved = 8 * GIB, list[str]()

    def free_bytes(self) -> int:
        return self.free

    def back(self) -> None:
        self.moved.append("back")

    def out(self) -> None:
        self.moved.append("out")


class Scene:
    """A trainer whose every look at the clock is a second later."""

    def __init__(self, check: Callable[[], None] = lambda: None, settle_s: float = 0.0) -> None:
        self.now, self.moves = 0.0, Moves()
        self.told = list[GpuTurn]()
        self.turns = GpuTurns((), 10.0, settle_s, self._staying, self._clock)
        self.turns.carry(self.moves, lambda: self.moves.moved.append("flushed"), self._tell)  # type: ignore[arg-type]
        self.waits = WaitPolicy(check, lambda line: None, 60.0)

    @contextmanager
    def _staying(self, _: Callable[[], object]) -> Iterator[None]:
        self.moves.moved.append("stays")
        yield
        self.moves.moved.append("goes")

    def _clock(self) -> float:
        self.now += 1.0
        return self.now

    def _tell(self) -> None:
        self.told.append(self.turns.turn)


def test_a_turn_is_taken_when_all_are_asleep_and_handed_over_after_everything_left() -> None:
    scene = Scene()
    scene.turns.join("p")
    first = scene.turns.turn.number
    scene.waits.check = lambda: scene.turns.report("p", first + 1)
    scene.turns.take(scene.waits)
    assert scene.turns.is_ours
    assert scene.turns.phase()[0] == "trainer"
    scene.turns.take(scene.waits)
    scene.turns.hand_over()
    scene.turns.hand_over()
    assert scene.moves.moved == ["stays", "back", "flushed", "out", "goes"]
    assert [(turn.number, turn.side) for turn in scene.told] == [(first + 1, "trainer"), (first + 2, "producers")]
    assert sum(scene.turns.spent_s().values()) == pytest.approx(scene.now - 1.0)


def test_a_producer_that_does_not_leave_is_named_and_the_turn_goes_back() -> None:
    scene = Scene()
    scene.turns.join("p")
    with pytest.raises(DeviceError, match=r"p did not leave the GPU within .*twice pipeline.gpu_handover_s=10"):
        scene.turns.take(scene.waits)
    assert scene.moves.moved == ["stays", "goes"]
    assert [turn.side for turn in scene.told] == ["trainer", "producers"]


def test_one_that_is_gone_is_not_waited_for() -> None:
    scene = Scene()
    scene.turns.join("p")
    scene.turns.leave("p")
    scene.turns.take(scene.waits)
    assert scene.moves.moved == ["stays", "back"]


def test_after_a_restart_producers_that_may_be_on_the_gpu_are_waited_for() -> None:
    scene = Scene(settle_s=3.0)
    looks = iter([True])

    def check() -> None:
        if next(looks, False):
            scene.turns.join("p")

    scene.waits.check = check
    with pytest.raises(DeviceError, match="p did not leave"):
        scene.turns.take(scene.waits)


def test_memory_that_somebody_keeps_ends_the_trainer_and_says_who(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.gpu.nvml.users", lambda gpus: {4711: 79 * GIB})
    scene = Scene()
    scene.moves.free = 1 * GIB
    with pytest.raises(DeviceError, match=r"needs 3.0 GiB of the GPU, and 1.0 GiB are free .*process 4711 79.0 GiB"):
        scene.turns.take(scene.waits)
    assert scene.moves.moved == ["stays", "goes"]
    assert not scene.turns.is_ours


def test_what_a_producer_said_to_the_trainer_before_does_not_count() -> None:
    before, after = Scene().turns, Scene().turns
    before._arbiter.ask(0.0)
    after.join("p")
    after.report("p", before.turn.number)
    after._arbiter.ask(0.0)
    assert after._arbiter.awake() == ["p"]


def test_the_metrics_say_whose_turn_it_is() -> None:
    scene, registry = Scene(), CollectorRegistry()
    watch_turns(registry, scene.turns)

    def sides(name: str) -> list[float | None]:
        return [registry.get_sample_value(f"rl_trainer_gpu_turn{name}", {"side": phase}) for phase in PHASES]

    assert sides("") == [1, 0, 0]
    scene.turns.take(scene.waits)
    assert sides("") == [0, 0, 1]
    assert all(sides("_seconds_total"))
    assert registry.get_sample_value("rl_trainer_gpu_turn_age_seconds")


def test_a_wait_for_a_producer_that_loads_its_engine_gives_signs_of_life_and_ends_with_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "ROOT", tmp_path)
    monkeypatch.setattr(tenants, "_PAUSE_S", 0.001)
    signs = iter(range(3))

    def check() -> None:
        if next(signs, None) is None:
            raise StopRequested

    scene = Scene(check)
    with tenancy("GPU-1", "producer", "run") as producer, tenancy("GPU-1", "trainer", "run") as trainer:
        scene.turns.stay = lambda check: trainer.alone(60.0, check, list)
        with producer.alone(0.0, lambda: False, pytest.fail), pytest.raises(StopRequested):
            scene.turns.take(scene.waits)
    assert scene.moves.moved == []
    assert not scene.turns.is_ours


def test_a_stop_while_it_waits_gives_the_turn_back() -> None:
    def stop() -> None:
        raise StopRequested

    scene = Scene(stop)
    scene.turns.join("p")
    with pytest.raises(StopRequested):
        scene.turns.take(scene.waits)
    assert scene.told[-1].side == "producers"
