"""The main thread's signs of life while it trains, as a transformers callback: one per micro-batch."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class Heartbeat(TrainerCallback):
    """Calls `beat`."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._beat()

    on_substep_end = on_step_end = on_save = on_step_begin
