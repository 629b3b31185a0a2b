"""When the main thread says that it is alive, and what systemd hears while a long last step ends."""

from typing import Any

import pytest
from transformers import TrainerCallback

from consumer.daemon import _beat
from consumer.training.heartbeat import Heartbeat
from tests.unit.protocol.service.test_health import World


@pytest.mark.parametrize("moment", ["on_step_begin", "on_substep_end", "on_step_end", "on_save"])
def test_every_micro_batch_step_and_checkpoint_beats(moment: str) -> None:
    assert hasattr(TrainerCallback, moment), "transformers calls it something else now"
    beats: list[str] = []
    nothing: Any = None
    getattr(Heartbeat(lambda: beats.append("beat")), moment)(nothing, nothing, nothing, model=nothing)
    assert beats == ["beat"]


def test_a_step_that_goes_on_after_a_stop_was_asked_for_asks_systemd_for_time() -> None:
    world = World()
    world.health.started("")
    _beat(world.health, lambda: False)
    assert (world.said("stopping"), world.said("extend"), world.said("watchdog")) == (0, 0, 1)
    _beat(world.health, lambda: True)
    _beat(world.health, lambda: True)
    assert (world.said("stopping"), world.said("extend"), world.said("watchdog")) == (1, 2, 3)
