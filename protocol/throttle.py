"""Lines about what happens again and again, without a flood.

Guarantee: the first few of a kind are shown, then at most one per interval, with the number of those left out; all of them
under `log_level: debug`.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

NUM_SHOWN_AT_ONCE = 5
THEN_EVERY_S = 60.0


@dataclass
class _Kind:
    num_shown: int = 0
    num_left_out: int = 0  # since the last one shown
    shown_at: float = 0.0


class Throttle:
    """Call it with a kind and a text.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._kinds: defaultdict[str, _Kind] = defaultdict(_Kind)

    def __call__(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        now, seen = self._clock(), self._kinds[kind]
        if seen.num_shown >= NUM_SHOWN_AT_ONCE and now - seen.shown_at < THEN_EVERY_S:
            seen.num_left_out += 1
            self._logger.debug("%s", text)
            return
        left_out = f" ({seen.num_left_out} more of this kind were left out)" if seen.num_left_out else ""
        fields = {"kind": kind, "num_left_out": seen.num_left_out}
        self._logger.log(level, "%s%s", text, left_out, extra={"fields": fields})
        seen.num_shown += 1
        seen.num_left_out, seen.shown_at = 0, now
