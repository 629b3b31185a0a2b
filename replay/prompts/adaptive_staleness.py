"""`pipeline.max_staleness: auto`: how old data may be, decided from what the last steps showed.

Guarantee: the staleness stays within its limits, moves by one version at a time, and only after a full window of steps
that ran under it alone; a widening that had to be taken back is tried again after twice the time, so the controller
settles where the evidence does.

    change     ... cool-down ...      ... window ...       decision
      |   data of the old budget drains   |   evidence   |  narrow, widen, or look at another window

Wider hides the time that generation takes and costs importance weights, whose effective sample share says how much of a
batch still counts. So: narrow when the share is below its bound; widen when the trainer waits for rollouts and the share
has room; take a widening back when it did not make steps faster, as when the engine is simply full.
"""

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

WINDOW = 8  # steps
WAIT_TO_WIDEN = 0.15  # share of the time; above 1 / WINDOW, so that a single stall is no evidence
LEAST_GAIN = 0.5  # of the time that a widening saves where steps wait for latency alone
LONGEST_PATIENCE = 64  # windows


@dataclass(eq=False)
class StalenessController:
    """See the module's guarantee. `staleness` is the versions that a group may be old when it is trained."""

    least: int  # versions; where it begins
    greatest: int  # versions
    min_effective_share: float  # narrows when the effective sample share is below it; in (0, 1)
    _cooling: int = WINDOW  # steps; the first ones show how the engine warms up
    _steps: list[tuple[float, float]] = field(default_factory=list)  # effective and wait share of those in the window
    _windows: int = 0  # since the last change
    _patience: int = 1  # windows to hold before the next widening
    _wait_before: float | None = None  # of the last change, if it was a widening

    def __post_init__(self) -> None:
        self.staleness = self.least
        self._share_to_widen = self.min_effective_share + (1 - self.min_effective_share) / 4

    def note(self, *, effective_share: float | None, wait_share: float) -> str | None:
        """What one optimizer step showed: Kish's effective sample share of its tokens (a step without one, None or NaN, is left
        out), and the share of the time since the last step that the trainer waited for rollouts. Returns the change that it
        led to in words, with its reason, or None."""
        if self._cooling > 0:
            self._cooling -= 1
            return None
        if effective_share is None or not math.isfinite(effective_share) or not math.isfinite(wait_share):
            return None
        self._steps.append((effective_share, wait_share))
        if len(self._steps) < WINDOW:
            return None
        share, wait = (fmean(values) for values in zip(*self._steps, strict=True))
        self._steps.clear()
        self._windows += 1
        return self._decide(share, wait)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs; plain data."""
        return {
            "staleness": self.staleness,
            "windows": self._windows,
            "patience": self._patience,
            "wait_before": self._wait_before,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint, within this controller's limits; the window starts anew, as the producers do."""
        self.staleness = min(max(state["staleness"], self.least), self.greatest)
        self._windows = state["windows"]
        self._patience = state["patience"]
        self._wait_before = state["wait_before"]
        self._steps.clear()
        self._cooling = max(WINDOW, self.staleness)

    def _decide(self, share: float, wait: float) -> str | None:
        if self.staleness > self.least:
            if share < self.min_effective_share:
                return self._narrow(f"effective sample share {share:.2f}, below {self.min_effective_share:g}")
            before = self._wait_before
            if before is not None and self._windows == 1 and not self._faster(before, wait):
                return self._narrow(f"widening saved no time: the trainer waited {before:.0%} before, {wait:.0%} since")
        has_room = self.staleness < self.greatest and share >= self._share_to_widen
        if has_room and wait > WAIT_TO_WIDEN and self._windows >= self._patience:
            if self._wait_before is not None:
                self._patience = 1  # the last widening was right
            seen = f"the trainer waited {wait:.0%} of the time for rollouts, effective sample share {share:.2f}"
            return self._change("widened", 1, wait, seen)
        return None

    def _faster(self, before: float, wait: float) -> bool:
        """Whether the last widening did what it was meant to.

        A step takes (time to train) / (1 - wait). With the latency L of a batch and S + 1 batches under way it takes
        L / (S + 1), so that S versions instead of S - 1 save 1 / (S + 1) of it, or the whole wait if that is less.
        """
        expected = min(before, 1 / (self.staleness + 1))
        return 1 - before < (1 - LEAST_GAIN * expected) * (1 - wait)

    def _narrow(self, reason: str) -> str:
        if self._wait_before is not None:
            self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        return self._change("narrowed", -1, None, reason)

    def _change(self, what: str, by: int, wait_before: float | None, reason: str) -> str:
        before, self.staleness = self.staleness, self.staleness + by
        self._cooling = max(WINDOW, before, self.staleness)  # groups of the old budget live no longer, in steps
        self._windows = 0
        self._wait_before = wait_before
        return f"{what} {before} -> {self.staleness}: {reason}"
