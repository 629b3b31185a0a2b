"""Which loops count as late, which phase counts as ready, and what systemd hears of it."""

import threading
from unittest.mock import create_autospec

import pytest

from protocol.runtime.health import Health, Notifier


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.extended = threading.Event()
        self.notifier = create_autospec(Notifier, instance=True)
        self.notifier.extend_timeout.side_effect = lambda seconds: self.extended.set()
        self.health = Health(10.0, self.notifier, clock=lambda: self.now)

    def said(self, kind: str) -> int:
        return getattr(self.notifier, kind).call_count


@pytest.fixture
def world() -> World:
    return World()


def test_a_loop_is_late_after_the_time_and_fine_again_with_the_next_beat(world: World) -> None:
    world.health.beat("training")
    world.now += 10.0
    assert world.health.alive() == {"training loop": None}
    world.now += 2.0
    why = "has not come round for 12 s (observability.unresponsive_after_s=10)"
    assert world.health.alive() == {"training loop": why}
    world.health.beat("training")
    assert world.health.alive() == {"training loop": None}


def test_a_check_that_is_added_while_others_run_does_no_harm(world: World) -> None:
    def check() -> None:
        world.health.check_alive("disk", lambda: None)
        world.health.check_ready("journal", lambda: None)

    world.health.check_alive("engine", check)
    world.health.check_ready("producers", check)
    world.health.ready()
    assert world.health.ready().keys() == {"engine", "producers", "disk", "journal", "phase"}


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
        assert world.extended.wait(10.0)
    asked = world.said("extend_timeout")
    assert asked >= 1
    with world.health.starting("loading again", limit_s=0.0):
        pass
    assert world.said("extend_timeout") == asked


def test_while_stopping_every_beat_asks_for_more_time_unless_a_loop_hangs(world: World) -> None:
    world.health.beat("training")
    assert world.said("extend_timeout") == 0
    world.health.stopping("draining")
    world.health.beat("training")
    assert world.said("extend_timeout") == 1
    world.health.beat("intake")
    world.now += 11.0
    world.health.beat("intake")
    assert world.said("extend_timeout") == 2
