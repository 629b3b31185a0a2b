"""What a producer notices of itself, once a second.

Guarantee: an engine that died while idle, and work that does not move any more, end the producer; how busy the engine was is
counted while a trainer is connected.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from producer.interfaces import Engine
from producer.state import Counters, Situation
from producer.timeline import Timeline
from producer.watchdog import Watchdog

_WATCH_EVERY_S = 1.0


class Supervision:
    """See the module's guarantee.

    Args:
        look: returns what there is to wait for now.
        beat: is called every time.
    """

    def __init__(
        self,
        engine: Engine,
        look: Callable[[], Situation],
        counters: Counters,
        timeline: Timeline,
        watchdog: Watchdog,
        beat: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._look = look
        self._counters = counters
        self._timeline = timeline
        self._watchdog = watchdog
        self._beat = beat

    async def run(self) -> None:
        """Until it is cancelled.

        Raises:
            EngineError: the engine is dead.
            StalledError: nothing moves any more.
        """
        now, busy_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._engine.check_alive()
            self._beat()
            situation = self._look()
            before, busy_before_s = now, busy_s
            now, busy_s = time.monotonic(), situation.workload.busy_s
            if situation.delivery.connected:
                self._counters.idle_s += max(0.0, (now - before) - (busy_s - busy_before_s))
                self._timeline.record("stats", **self.totals())
            self._watchdog.check(now, self._counters, situation)

    def totals(self) -> dict[str, Any]:
        counters, busy_s = self._counters, self._look().workload.busy_s
        counts = {name: getattr(counters, name) for name in ("tokens", "groups", "failed", "abandoned")}
        return counts | {"busy_s": round(busy_s, 3), "idle_s": round(counters.idle_s, 3)}
