"""Checks that a producer makes of itself, once a second.

Guarantee: an engine that died while idle ends the producer, and so does work that does not move any more: leases were in hand,
with the trainer connected, for the whole of `stall_timeout_s` and no group was finished, refused or acknowledged and no adapter
arrived. Waiting for a trainer, for the end of its turn on the GPU, for leases or for outside agents is no stall, and a lease that
ran into its deadline is no progress: an engine that hangs lets all of them do so. While the engine is out of order for a time,
leases go back to the trainer, and so do those that wait for a version that was refused for good. How busy the engine was is
counted while a trainer is connected and the engine awake.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from producer.app.timeline import Timeline
from producer.engine_contract import Engine
from producer.metrics import Situation
from producer.rollouts.leases import Generation
from protocol.errors import StalledError
from protocol.runtime.stacks import log_stacks

_WATCH_EVERY_S = 1.0


@dataclass
class Watchdog:
    stall_timeout_s: float
    _since: float | None = None
    _progress: tuple[int, ...] = ()

    def check(self, now: float, situation: Situation) -> None:
        """Called again and again. Raises StalledError when nothing moved for too long; the message says who waits for what."""
        counters, delivery = situation.counters, situation.delivery
        refused = counters.failed - counters.timed_out
        progress = (counters.groups, refused, counters.settled, counters.swaps, counters.failed_swaps)
        if (
            self._since is None
            or not (delivery.connected and delivery.held > situation.workload.with_agents)
            or counters.asleep_in >= 0
            or progress != self._progress
        ):
            self._since, self._progress = now, progress
        elif now - self._since >= self.stall_timeout_s:
            log_stacks(f"no progress for {self.stall_timeout_s:g} s")
            raise StalledError(
                f"no progress for pipeline.stall_timeout_s={self.stall_timeout_s:g} seconds with {delivery.held} leases "
                "in hand; restart the process that the others wait for, or raise the limit. What waits for what:\n  "
                + "\n  ".join(describe(situation))
            )


def describe(situation: Situation) -> list[str]:
    """List what each kind of work waits for, one line each."""
    work, delivery, version = situation.workload, situation.delivery, situation.counters.policy_version
    loaded = f"v{version} is loaded" if version >= 0 else "none is loaded"
    floors = Counter(floor for floor in work.waiting_floors if floor > version)
    paused = ", above transport.max_unacked_bytes: generation is paused until then" if delivery.full else ""
    return [
        *(f"leases waiting for policy v{floor} ({loaded}): {count}" for floor, count in sorted(floors.items())),
        f"leases waiting for {'acknowledgements' if delivery.full else 'room in the engine'}: "
        f"{len(work.waiting_floors) - floors.total()}",
        f"leases generating: {work.generating}",
        f"leases being scored: {work.scoring} (reward workers: "
        f"{situation.num_workers - situation.num_idle_workers} busy, {situation.num_idle_workers} idle)",
        f"groups waiting for the trainer's acknowledgement: {delivery.unacked} ({delivery.unacked_bytes} bytes{paused})",
        f"the trainer was last heard {delivery.heard_ago_s:.1f} s ago",
    ]


@dataclass
class Supervision:
    """Watch the engine and the progress. `on_tick` is called every time. `generation` gives leases back while the engine has an
    outage, and those that wait for a newer version than is served while one is refused for good."""

    engine: Engine
    read_status: Callable[[], Situation]
    timeline: Timeline
    watchdog: Watchdog
    on_tick: Callable[[], None]
    generation: Generation

    async def run(self) -> None:
        """Run until cancelled. Raises EngineError if the engine died, StalledError if nothing progresses."""
        now, busy_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self.engine.check_alive()
            self.on_tick()
            if self.engine.outage() is not None:
                self.generation.hand_back_ungenerated()
            situation = self.read_status()
            if situation.counters.num_refused > 0:
                self.generation.hand_back_above(situation.counters.policy_version)
            before, busy_before_s = now, busy_s
            now, busy_s = time.monotonic(), situation.workload.busy_s
            if situation.delivery.connected:
                if situation.counters.asleep_in < 0:
                    situation.counters.idle_s += max(0.0, (now - before) - (busy_s - busy_before_s))
                self.timeline.record("stats", **self.totals())
            self.watchdog.check(now, situation)

    def totals(self) -> dict[str, Any]:
        situation = self.read_status()
        counters, busy_s = situation.counters, situation.workload.busy_s
        names = ("tokens", "dropped_tokens", "groups", "failed", "abandoned")
        counts = {name: getattr(counters, name) for name in names}
        return counts | {"busy_s": round(busy_s, 3), "idle_s": round(counters.idle_s, 3)}
