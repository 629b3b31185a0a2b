"""What happens to a process of a chaos run, drawn from a seed.

Guarantee: every point is aimed at before any is aimed at again, so that a run of so many kills has met them all; equal
seeds give equal fates (when a process gets as far as its point is up to the machine).
"""

import random
import signal
from dataclasses import dataclass
from typing import Literal

from campaigns.chaos import aims
from campaigns.chaos.fleet import Role

Kind = Literal["aimed kill", "kill", "aimed stop", "stop", "power cut", "none"]


@dataclass(frozen=True)
class Fate:
    """A kill or a stop, of one process.

    Attributes:
        point: where an aimed one happens; one that is never reached becomes a kill after `after_s`.
        after_s: since the start of the process, or since the end of the last stop.
        stop_s: how long it stands still; a rank never goes on.
    """

    kind: Kind
    after_s: float
    point: str = ""
    count: int = 1
    stop_s: float = 0.0
    at_rank: bool = False  # the last of several ranks, when rank 0 reaches the point

    @property
    def aim(self) -> tuple[str, int, int] | tuple[()]:
        if not self.point:
            return ()
        return (self.point, self.count, signal.SIGSTOP if self.kind == "aimed stop" else signal.SIGKILL)


NONE = Fate("none", float("inf"))
_OFTEN = {"checkpoint.syncing": 12, "checkpoint.uncounted": 1, "append.row": 10}
_ONCE = ("hello.begin", "hello.sent", "welcome.received", "checkpoint.uncounted", *aims.START, *aims.ANCHOR[:2])
_PATIENCE_S = {"trainer": 6.0, "producer": 10.0}  # for a point that is not reached
_IN_A_STEP = ("claim.committed", "step.begin", "step.loss")
_SHARE_TWICE = 0.5  # of deaths in a step that happen again in the same one, so that its groups are quarantined
_LATEST = {"trainer": (6, 4.0), "producer": (60, 15.0)}
"""By role: how many times a point is passed, and how long a process lives, at most, before it is killed. There are several
producers, and as many kills are meant for them together as for the trainer."""


class FateDeck:
    """The fates of one role.

    Args:
        stop_limit_s: a stop lasts no longer; above the heartbeat timeout, so that the other side notices some.
    """

    def __init__(
        self,
        role: Role,
        seed: int,
        *,
        retention: bool = False,
        ranks: int = 1,
        full: bool = False,
        stop_limit_s: float = 2.0,
    ) -> None:
        self._random = random.Random(f"{role} {seed}")
        self._patience_s = _PATIENCE_S[role]
        self._most, self._latest_s = _LATEST[role]
        points = (*aims.START, *aims.TRAINER, *aims.CHECKPOINT) if role == "trainer" else aims.PRODUCER
        points = (*points, *aims.RETENTION) if retention else points
        if full:  # more often than the others, which the run of an adapter reaches too
            points = (*points, *(2 * (aims.PATCH + aims.ANCHOR if role == "trainer" else aims.PATCHED)))
        self._points = (*points, *aims.RANKS) if ranks > 1 else points
        self._share_at_rank = 0.4 if ranks > 1 else 0.0
        self._decks: dict[str, list[str]] = {}
        self._again: Fate | None = None
        self._stop_limit_s = stop_limit_s
        weights = {"aimed kill": 60, "kill": 16, "aimed stop": 10, "stop": 10, "power cut": 4}
        self._kinds = list(weights)
        self._weights = list(weights.values()) if role == "trainer" else [*list(weights.values())[:-1], 0]

    def draw(self) -> Fate:
        """For a process that starts."""
        if self._again is not None:
            fate, self._again = self._again, None
            return fate
        (kind,) = self._random.choices(self._kinds, self._weights)
        if kind in ("aimed kill", "aimed stop"):
            if self._share_at_rank and self._random.random() < self._share_at_rank:
                point = self._next_point(f"{kind} of a rank", aims.AT_RANK)
                count = self._random.randint(1, 2 if point in aims.CHECKPOINT else self._most)
                return Fate(kind, self._patience_s, point, count, at_rank=True)
            point = self._next_point(kind, self._points)
            most = 1 if point in _ONCE else 2 if point in aims.CHECKPOINT else self._most
            count = self._random.randint(1, _OFTEN.get(point, most))
            if kind == "aimed kill" and point in _IN_A_STEP and self._random.random() < _SHARE_TWICE:
                count, self._again = 1, Fate(kind, self._patience_s, point)
            return Fate(kind, self._patience_s, point, count, self._stop_s())
        return Fate(kind, self._random.uniform(0.05, self._latest_s), stop_s=self._stop_s() if kind == "stop" else 0.0)

    def draw_after_stop(self) -> Fate:
        """For a process that goes on."""
        return Fate("kill", self._random.uniform(0.05, 3.0))

    def _next_point(self, kind: str, points: tuple[str, ...]) -> str:
        deck = self._decks.setdefault(kind, [])
        if not deck:
            deck.extend(points)
            self._random.shuffle(deck)
        return deck.pop()

    def _stop_s(self) -> float:
        return self._random.uniform(0.1, self._stop_limit_s)
