"""Until when a source of a policy is waited for: arithmetic without clocks or sockets.

Guarantee: a source is left when nothing came of it for as long as a few pieces should take, and when at the pace that it had it
would not be done by its deadline. The deadline is a few times what downloads of this producer took, so it ends in any case.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

PATIENCE_S = 2.0  # for connections, for a relay that has not heard of the policy yet, and for a busy machine
_PACE_SHOWS_AFTER_S = 1.0
_TIMES = 4.0  # as long as measured
_SLOWEST_BYTES_PER_S = 2.0**20  # assumed while nothing was measured, and whatever was

Lateness = Literal["silent", "slow"]


def allowed_s(num_bytes: int, bytes_per_s: float) -> float:
    """How long so many bytes may take, where others came at this rate."""
    return PATIENCE_S + _TIMES * num_bytes / bytes_per_s


@dataclass
class Rates:
    """What downloads of this producer had, of which the slowest counts. One thread at a time may note, any may read."""

    _last: deque[float] = field(default_factory=partial(deque, maxlen=8))

    def note(self, num_bytes: int, seconds: float) -> None:
        self._last.append(num_bytes / max(seconds, 1e-6))

    @property
    def bytes_per_s(self) -> float:
        return max(min(self._last, default=0.0), _SLOWEST_BYTES_PER_S)


@dataclass
class Pace:
    """Of one source that is to bring `num_bytes` in pieces of at most `piece_bytes`. Times are the caller's, in seconds."""

    num_bytes: int
    piece_bytes: int
    bytes_per_s: float  # that others had
    began_at: float
    num_arrived: int = 0  # bytes
    _first: tuple[int, float] | None = None  # what was there when something came first, and when that was
    _progress_at: float = -math.inf

    def note(self, done: int, now: float) -> None:
        """So many bytes are there in all. Fewer than before, or more than there can be, are no progress."""
        if self.num_arrived < done <= self.num_bytes:
            self.num_arrived, self._progress_at = done, now
            self._first = self._first or (done, now)

    def lateness(self, now: float) -> Lateness | None:
        """Why this source is to be left; None: it is not."""
        if now - max(self.began_at, self._progress_at) > allowed_s(self.piece_bytes, self.bytes_per_s):
            return "silent"
        ends_at = now + self._left_s(now)
        return "slow" if ends_at - self.began_at > allowed_s(self.num_bytes, self.bytes_per_s) else None

    def _left_s(self, now: float) -> float:
        """At the pace since something came first; 0 as long as nobody can tell."""
        if self._first is None:
            return 0.0
        done, at = self._first
        if now - at < _PACE_SHOWS_AFTER_S or self.num_arrived == done:
            return 0.0
        return (self.num_bytes - self.num_arrived) * (now - at) / (self.num_arrived - done)
