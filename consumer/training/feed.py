"""The main thread's wait for rollouts: from the rollout buffer to the training loop.

Guarantee: it yields exactly the batches that were cut, in order. It ends a run by raising: `StopRequested` after a signal,
at a step boundary; `NoSignalError` when what came gives nothing to learn from, `StalledError` when nothing usable came for too
long; whatever ended the intake thread.
"""

import math
import time
from collections.abc import Iterator

from consumer.intake.intake import Intake
from consumer.waiting import Patience
from protocol.errors import StalledError
from replay.batches.cutting import CutBatch
from replay.buffer import RolloutBuffer

_POLL_S = 0.25


class BatchFeed:
    """Iterates over the batches of a run.

    Args:
        partial_after_s: how long to wait for a full batch before a partial one will do; None: for ever.
    """

    def __init__(
        self, buffer: RolloutBuffer, intake: Intake, patience: Patience, *, partial_after_s: float | None = None
    ) -> None:
        self._buffer = buffer
        self._intake = intake
        self._patience = patience
        self._partial_after_s = math.inf if partial_after_s is None else partial_after_s
        self._waits_since: float | None = None  # None: nobody waits
        self.wait_s = 0.0  # spent on the last batch
        self.last: CutBatch | None = None

    def __iter__(self) -> Iterator[CutBatch]:
        while True:
            self._patience.check()
            self._waits_since = time.monotonic()
            try:
                self.last = self._patience.wait_until(self._attempt, "rollouts", self._describe)
            except StalledError:
                self._buffer.check_stalled()
                raise
            self.wait_s, self._waits_since = self.waiting_s(), None
            self._intake.wake()  # a batch was cut: there is room for leases
            yield self.last

    def waiting_s(self) -> float:
        """Of the wait in progress; 0 if there is none. May be called from any thread."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def _attempt(self) -> CutBatch | None:
        return self._buffer.next_batch(_POLL_S, partial=self.waiting_s() >= self._partial_after_s)

    def _describe(self) -> str:
        return f"{self._intake.describe()}; so far {dict(self._buffer.totals)}"
