"""When the main thread says that it is alive, and what systemd hears while a long last step ends."""

from typing import Any, cast

import pytest
from transformers import TrainerCallback

from consumer.app.run import Liveness
from consumer.waiting import StopRequested, ThreadErrors
from tests.unit.protocol.runtime.test_health import World


@pytest.mark.parametrize("moment", ["on_step_begin", "on_substep_end", "on_step_end", "on_save"])
def test_every_micro_batch_step_and_checkpoint_beats(moment: str) -> None:
    assert hasattr(TrainerCallback, moment), "transformers calls it something else now"
    world, nothing = World(), cast("Any", None)
    world.health.started("")
    heartbeat = Liveness(world.health, lambda: False, ThreadErrors())
    getattr(heartbeat, moment)(nothing, nothing, nothing, model=nothing)
    assert world.said("watchdog") == 1


def test_a_step_that_goes_on_after_a_stop_was_asked_for_asks_systemd_for_time() -> None:
    world, stops = World(), [False]
    world.health.started("")
    heartbeat = Liveness(world.health, lambda: stops[0], ThreadErrors())
    heartbeat.check()
    assert (world.said("stopping"), world.said("extend_timeout"), world.said("watchdog")) == (0, 0, 1)
    stops[0] = True
    for _ in range(2):
        with pytest.raises(StopRequested):
            heartbeat.check()
    assert (world.said("stopping"), world.said("extend_timeout"), world.said("watchdog")) == (1, 2, 3)


def test_what_ended_another_thread_ends_the_waits_of_the_main_thread() -> None:
    errors = ThreadErrors()
    heartbeat = Liveness(World().health, lambda: False, errors)
    errors.note(OSError("socket gone"))
    errors.note(ValueError("because of that"))
    with pytest.raises(OSError, match="socket gone"):
        heartbeat.check()
