"""The main thread's wait: from the rollout buffer to the training loop.

Guarantee: it yields exactly the batches that were cut, in order, and never waits without saying for whom. It ends a run
by raising: `StopRequested` after a signal, at a step boundary; `StalledError` when nothing usable came for
`stall_timeout_s` although producers are connected; whatever ended the intake thread.
"""

import time
from collections.abc import Callable, Iterator

from consumer.intake import Intake
from protocol.errors import StalledError
from replay.buffer import CutBatch, RolloutBuffer

_POLL_S = 0.25
_SAY_EVERY_S = 10.0


class StopRequested(Exception):  # noqa: N818  a request, not an error
    """SIGTERM or Ctrl-C arrived; everything trained so far is in the weights."""


class BatchFeed:
    """Iterates over the batches of a run.

    Args:
        stop_requested: asked several times a second while waiting, and once per step.
        say: shows a line to the user.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        intake: Intake,
        *,
        stop_requested: Callable[[], bool],
        say: Callable[[str], None],
        stall_timeout_s: float,
    ) -> None:
        self._buffer = buffer
        self._intake = intake
        self._stop_requested = stop_requested
        self._say = say
        self._stall_timeout_s = stall_timeout_s
        self.wait_s = 0.0  # spent on the last batch
        self.last: CutBatch | None = None

    def __iter__(self) -> Iterator[CutBatch]:
        while True:
            self.last = self._next()
            self._intake.wake()  # a batch was cut: there is room for leases
            yield self.last

    def _next(self) -> CutBatch:
        started = said = alone = time.monotonic()
        while True:
            if self._stop_requested():
                raise StopRequested
            self._intake.check()
            batch = self._buffer.next_batch(_POLL_S)
            now = time.monotonic()
            if batch is not None:
                self.wait_s = now - started
                return batch
            if self._intake.num_producers == 0:
                alone = now
            if now - said > _SAY_EVERY_S:
                said = now
                self._say(f"waiting for rollouts ({now - started:.0f} s): {self._intake.describe()}")
            if now - max(started, alone) > self._stall_timeout_s:
                raise StalledError(
                    f"no batch for pipeline.stall_timeout_s={self._stall_timeout_s:.0f} s: {self._intake.describe()}; "
                    f"so far {dict(self._buffer.counts)}"
                )
