"""Which loops count as late, which phase counts as ready, and what systemd hears of it."""

import threading

import pytest

from protocol.service.health import Health


class FakeNotifier:
    def __init__(self) -> None:
        self.said: list[tuple[str, object]] = []
        self.extended = threading.Event()

    def watchdog(self) -> None:
        self.said.append(("watchdog", None))

    def extend_timeout(self, seconds: float) -> None:
        self.said.append(("extend", seconds))
        self.extended.set()

    def ready(self, status: str) -> None:
        self.said.append(("ready", status))

    def stopping(self, status: str) -> None:
        self.said.append(("stopping", status))

    def status(self, text: str) -> None:
        self.said.append(("status", text))


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.notifier = FakeNotifier()
        self.health = Health(10.0, self.notifier, clock=lambda: self.now)  # type: ignore[arg-type]

    def said(self, kind: str) -> int:
        return [what for what, _ in self.notifier.said].count(kind)


@pytest.fixture
def world() -> World:
    return World()


def test_a_loop_is_late_after_the_time_and_fine_again_with_the_next_beat(world: World) -> None:
    world.health.beat("training")
    world.now += 10.0
    assert world.health.alive() == {"training loop": None}
    world.now += 2.0
    why = world.health.alive()["training loop"]
    assert why is not None
    assert "12 s" in why
    assert "observability.unresponsive_after_s=10" in why
    world.health.beat("training")
    assert world.health.alive() == {"training loop": None}


def test_the_watchdog_is_fed_only_while_every_loop_comes_round(world: World) -> None:
    world.health.beat("intake")
    world.health.beat("training")
    assert world.said("watchdog") == 2
    world.now += 11.0
    world.health.beat("intake")  # the other one hangs
    assert world.said("watchdog") == 2
    world.health.beat("training")
    assert world.said("watchdog") == 3


def test_a_loop_that_never_beat_or_ended_as_it_should_is_not_missed(world: World) -> None:
    assert world.health.alive() == {}
    world.health.beat("intake")
    world.health.end("intake")
    world.now += 1000.0
    assert world.health.alive() == {}


def test_ready_says_the_phase_until_the_daemon_has_started_and_again_when_it_stops(world: World) -> None:
    assert world.health.ready() == {"phase": "starting"}
    with world.health.starting("loading the model", limit_s=60.0):
        assert world.health.ready() == {"phase": "loading the model"}
    world.health.started("listening")
    assert world.health.ready() == {"phase": None}
    world.health.stopping("draining")
    world.health.stopping("noticed once more")
    assert world.health.ready() == {"phase": "stopping"}
    assert world.said("ready") == world.said("stopping") == 1


def test_checks_of_life_count_for_readiness_too_and_not_the_other_way_round(world: World) -> None:
    world.health.started("")
    world.health.check_alive("disk", lambda: "91% full")
    world.health.check_ready("producers", lambda: "none is connected")
    assert world.health.alive() == {"disk": "91% full"}
    assert world.health.ready() == {"phase": None, "disk": "91% full", "producers": "none is connected"}


def test_while_starting_systemd_is_asked_for_patience_up_to_the_limit(world: World) -> None:
    with world.health.starting("loading", limit_s=60.0):
        assert world.notifier.extended.wait(10.0)
    asked = world.said("extend")
    assert asked >= 1
    with world.health.starting("loading again", limit_s=0.0):
        pass
    assert world.said("extend") == asked


def test_while_stopping_every_beat_asks_for_more_time_unless_a_loop_hangs(world: World) -> None:
    world.health.beat("training")
    assert world.said("extend") == 0
    world.health.stopping("draining")
    world.health.beat("training")
    assert world.said("extend") == 1
    world.health.beat("intake")
    world.now += 11.0
    world.health.beat("intake")
    assert world.said("extend") == 2
