"""The main thread's signs of life while it trains or waits, as a transformers callback: one per micro-batch."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from consumer.waiting import StopRequested, ThreadErrors
from protocol.service.health import Health


class Heartbeat(TrainerCallback):
    """Tells `health` that the main thread came round. Asked to stop, it says so at once, because the step in progress may take
    long."""

    def __init__(self, health: Health, stop_requested: Callable[[], bool], errors: ThreadErrors) -> None:
        self._health = health
        self._stop_requested = stop_requested
        self._errors = errors

    def check(self) -> None:
        """For waits: also raises when waiting makes no sense any more, `StopRequested` or what ended another thread."""
        self._beat()
        if self._stop_requested():
            raise StopRequested
        self._errors.check()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._beat()

    on_substep_end = on_step_end = on_save = on_step_begin

    def _beat(self) -> None:
        if self._stop_requested():
            self._health.stopping("the step in progress ends, then a checkpoint is written")
        self._health.beat("training")
