"""What is told of swaps: to the trainer and `/readyz` by the counters, to metrics, timeline and log.

Guarantee: every swap and every refusal is told once, everywhere.
"""

import logging
import time
from dataclasses import dataclass

from producer.interfaces import Adapter, DownloadedPolicy
from producer.metrics import ProducerMetrics
from producer.policies.loading import Loaded
from producer.state import Counters
from producer.timeline import Timeline
from protocol.runtime import logs

logger = logging.getLogger(__name__)

_MAX_REASON = 500  # characters of it that the trainer is told


@dataclass
class SwapReport:
    counters: Counters
    metrics: ProducerMetrics
    timeline: Timeline

    def note_current(self, adapter: Adapter | None) -> None:
        """What requests start on from now on."""
        self.counters.policy_version = -1 if adapter is None else adapter.version
        self.counters.refused_version, self.counters.refusal = -1, ""
        logs.bind(version=None if adapter is None else adapter.version)

    def note_live(self, downloaded: DownloadedPolicy, loaded: Loaded) -> None:
        version, swap_s = downloaded.policy.version, time.monotonic() - downloaded.announced_at
        self.counters.swaps += 1
        self.metrics.swap_s.observe(swap_s)
        self.metrics.load_s.observe(loaded.load_s)
        numbers = {"load_ms": loaded.load_s * 1000, "probe_ms": loaded.verify_s * 1000, "bytes": len(downloaded.blob)}
        rounded = {name: round(value, 3) for name, value in numbers.items()}
        if loaded.probe_difference is not None:
            rounded["probe_difference"] = float(f"{loaded.probe_difference:.3g}")
        self.timeline.record("swap", version=version, ms=round(swap_s * 1000, 3), **rounded)
        fields = {"swap_ms": swap_s * 1000} | numbers
        logger.info(
            "policy v%d is live (%.0f ms after its announcement)", version, swap_s * 1000, extra={"fields": fields}
        )

    def note_refused(self, version: int, reason: str, current: Adapter | None) -> None:
        counters = self.counters
        counters.failed_swaps += 1
        counters.refused_version, counters.refusal = version, reason[:_MAX_REASON]
        kept = f"v{current.version} stays" if current else "no version is served yet"
        logger.error("policy v%d is refused, %s: %s", version, kept, reason)
        self.timeline.record("swap_refused", version=version, reason=reason)
