"""Difficulty that rises with success: the sources of a dataset that are open (`dataset.curriculum`).

Guarantee: the level follows from the groups that arrived, in the journal's order, and from nothing else, so a checkpoint and the
journal restore it. Groups of other levels, returns, and groups that nothing scored do not count. At a level a window begins
empty, and the level changes by one, when the window is full.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from protocol.config.data import CurriculumSection
from replay.signal_chances import GradedGroup

logger = logging.getLogger(__name__)


class CurriculumState(NamedTuple):
    """The level, from 0, and the success rate of the groups in the window; NaN without any."""

    level: int
    success_rate: float


class Curriculum:
    """The level of a run.

    Args:
        levels: of each source; one without a level is always open.
        source_of: tells the source of a prompt.
    """

    def __init__(
        self, section: CurriculumSection, levels: Sequence[int | None], source_of: Callable[[int], int]
    ) -> None:
        self._section = section
        self._levels = levels
        self._source_of = source_of
        self._top = max(level for level in levels if level is not None)
        self._level = 0
        self._window: deque[tuple[int, int]] = deque(maxlen=section.window)  # scored completions, successes

    @property
    def now(self) -> CurriculumState:
        scored = sum(each for each, _ in self._window)
        return CurriculumState(self._level, sum(each for _, each in self._window) / scored if scored else math.nan)

    def share(self, prompt_id: int) -> float:
        """Return the probability with which a prompt may be asked: 0 above the level."""
        level = self._levels[self._source_of(prompt_id)]
        if level is None or level == self._level:
            return 1.0
        return self._section.rehearse if level < self._level else 0.0

    def note(self, group: GradedGroup) -> None:
        """Learn from a group that arrived."""
        if self._levels[self._source_of(group.prompt_id)] != self._level or group.reroll or not group.num_scored:
            return
        self._window.append((group.num_scored, group.num_successes))
        if len(self._window) < self._section.window:
            return
        rate, down = self.now.success_rate, self._section.down
        if rate >= self._section.up and self._level < self._top:
            self._move(self._level + 1, rate)
        elif down is not None and rate <= down and self._level > 0:
            self._move(self._level - 1, rate)

    def _move(self, level: int, rate: float) -> None:
        logger.info(
            "dataset.curriculum: the level is %d of %d, and was %d, because in %d groups %.1f %% of the completions succeeded",
            level, self._top, self._level, len(self._window), 100 * rate,
        )  # fmt: skip
        self._level = level
        self._window.clear()

    def state(self) -> dict[str, Any]:
        """Return all that is known as plain data."""
        return {"level": self._level, "window": [list(each) for each in self._window]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`; the highest level if there are fewer now."""
        self._level = min(state["level"], self._top)
        self._window.clear()
        self._window.extend((scored, successes) for scored, successes in state["window"])
