"""What a producer notices of itself, once a second.

Guarantee: an engine that died while idle, and work that does not move any more, end the producer; how busy the engine was is
counted while a trainer is connected.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from producer.interfaces import Engine
from producer.state import Situation
from producer.timeline import Timeline
from producer.watchdog import Watchdog

_WATCH_EVERY_S = 1.0


@dataclass
class Supervision:
    """See the module's guarantee.

    Args:
        beat: is called every time.
    """

    engine: Engine
    look: Callable[[], Situation]
    timeline: Timeline
    watchdog: Watchdog
    beat: Callable[[], None]

    async def run(self) -> None:
        """Until it is cancelled.

        Raises:
            EngineError: the engine is dead.
            StalledError: nothing moves any more.
        """
        now, busy_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self.engine.check_alive()
            self.beat()
            situation = self.look()
            before, busy_before_s = now, busy_s
            now, busy_s = time.monotonic(), situation.workload.busy_s
            if situation.delivery.connected:
                situation.counters.idle_s += max(0.0, (now - before) - (busy_s - busy_before_s))
                self.timeline.record("stats", **self.totals())
            self.watchdog.check(now, situation)

    def totals(self) -> dict[str, Any]:
        situation = self.look()
        counters, busy_s = situation.counters, situation.workload.busy_s
        counts = {name: getattr(counters, name) for name in ("tokens", "groups", "failed", "abandoned")}
        return counts | {"busy_s": round(busy_s, 3), "idle_s": round(counters.idle_s, 3)}
