"""Lines about what happens again and again, without a flood.

Guarantee: the first few of a kind are shown, then at most one per interval, with the number of those left out; all of them
under `log_level: debug`. May be used from any thread.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass


@dataclass
class _Kind:
    num_shown: int = 0
    num_left_out: int = 0  # since the last one shown
    shown_at: float = 0.0


@dataclass
class Throttle:
    """Call it with a kind and a text. `num_at_once` lines of a kind are shown whenever they come, then one in
    `then_every_s`."""

    logger: logging.Logger
    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    num_at_once: int = 5
    then_every_s: float = 60.0

    def __post_init__(self) -> None:
        self._kinds: defaultdict[str, _Kind] = defaultdict(_Kind)
        self._lock = threading.Lock()

    def __call__(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        with self._lock:
            now, seen = self.clock(), self._kinds[kind]
            if seen.num_shown >= self.num_at_once and now - seen.shown_at < self.then_every_s:
                seen.num_left_out += 1
                self.logger.debug("%s", text)
                return
            left_out = f" ({seen.num_left_out} more of this kind were left out)" if seen.num_left_out else ""
            fields = {"kind": kind, "num_left_out": seen.num_left_out}
            seen.num_shown += 1
            seen.num_left_out, seen.shown_at = 0, now
        self.logger.log(level, "%s%s", text, left_out, extra={"fields": fields})
