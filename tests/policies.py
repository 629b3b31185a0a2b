"""A registry of policies around any weights, as tests need it."""

from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from producer.interfaces import PolicyWeights
from producer.metrics import ProducerMetrics
from producer.policies.loading import PolicyLoader
from producer.policies.registry import AdapterRegistry
from producer.policies.swap_report import SwapReport
from producer.policies.verification import SwapProof
from producer.state import Counters
from producer.timeline import Timeline


def registry_of(
    weights: PolicyWeights,
    folder: Path,
    counters: Counters | None = None,
    tolerance: float = 1e-3,
    metrics: ProducerMetrics | None = None,
    **options: Any,
) -> AdapterRegistry:
    """It unpacks adapters in `folder`/adapters and writes `folder`/timeline.jsonl.

    Args:
        tolerance: in nats.
        options: of the registry.
    """
    loader = PolicyLoader(weights, lambda num_bytes: folder / "adapters", SwapProof(tolerance))
    metrics = metrics or ProducerMetrics(CollectorRegistry())
    report = SwapReport(counters or Counters(), metrics, Timeline(folder / "timeline.jsonl"))
    return AdapterRegistry(loader, report, **options)
