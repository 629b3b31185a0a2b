"""Watches a run for `slipstream status` and the page with the same numbers.

Guarantee: one view takes seconds at most, whatever the daemons do; what is remembered is bounded by `WINDOW_S`.
"""

import time
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from slipstream.run_reader import RunReader
from slipstream.status.daemons import Answer, ask, find_daemons
from slipstream.status.reading import View, read

WINDOW_S = 60.0
_TAIL_BYTES = 512 * 1024  # the lines of some 200 steps


class Watch:
    """Watches one run. It remembers the answers that rates are computed from, and rewards for a run without files."""

    def __init__(self, run: RunReader | None, addresses: Sequence[str]) -> None:
        self._run = run
        self._addresses = addresses
        self._looks: deque[tuple[float, list[Answer]]] = deque()
        self._seen: dict[int, float] = {}

    def look(self) -> View:
        now = time.monotonic()
        self._looks.append((now, ask(find_daemons(self._run, self._addresses))))
        while now - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()
        shown = read([answers for _, answers in self._looks])
        ended = self._run.ended() if self._run and not shown.answers else None
        return replace(shown, at=shown.at or time.time(), rewards=self._rewards(shown), ended=ended)

    def _rewards(self, shown: View) -> dict[int, float]:
        """The rewards in the run's file; where there is none, those that were seen."""
        trainer = shown.trainer
        if trainer is not None and trainer.step and trainer.reward is not None:
            self._seen = {step: reward for step, reward in self._seen.items() if step < trainer.step}
            self._seen[trainer.step] = trainer.reward
        return rewards_of_steps(self._run) or dict(self._seen)


def rewards_of_steps(run: RunReader | None) -> dict[int, float]:
    try:
        lines = run.newest_steps(_TAIL_BYTES) if run else []
    except OSError:
        return {}
    found = {line.get("step"): line.get("reward") for line in lines}
    return {step: reward for step, reward in found.items() if isinstance(step, int) and isinstance(reward, int | float)}
