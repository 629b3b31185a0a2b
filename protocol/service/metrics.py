"""What the metrics of both daemons have in common: one registry, numbers read when they are scraped, process and GPU memory.

Guarantee: a number that a part keeps anyway is read at the scrape and costs nothing before. Every label value that is known in
advance is there from the start, and no label grows with the run (no step, version, prompt or group is a label).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.processes.tree import resident_bytes

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for every counter, which nobody reads

Number = Callable[[], float]
Numbers = Callable[[], Mapping[str, float] | Mapping[tuple[str, str], float]]  # by label value, or values


@dataclass(frozen=True)
class _Reading:
    kind: Literal["counter", "gauge"]
    name: str
    documentation: str
    labels: tuple[str, ...]
    read: Number | Numbers

    def family(self) -> Metric:
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.documentation, labels=self.labels)
        value = self.read()
        for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            family.add_metric((labels,) if isinstance(labels, str) else labels, number)
        return family


class Readings(Collector):
    """Numbers that other parts keep. A counter's name ends in `_total`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._readings: list[_Reading] = []
        registry.register(self)

    def counter(self, name: str, documentation: str, read: Number) -> None:
        self._readings.append(_Reading("counter", name, documentation, (), read))

    def counters(self, name: str, documentation: str, label: str, read: Numbers) -> None:
        self._readings.append(_Reading("counter", name, documentation, (label,), read))

    def gauge(self, name: str, documentation: str, read: Number) -> None:
        self._readings.append(_Reading("gauge", name, documentation, (), read))

    def gauges(self, name: str, documentation: str, labels: str | tuple[str, ...], read: Numbers) -> None:
        names = (labels,) if isinstance(labels, str) else labels
        self._readings.append(_Reading("gauge", name, documentation, names, read))

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            yield reading.family()


class Reexport(Collector):
    """The families of another registry whose names begin with `prefix`."""

    def __init__(self, registry: CollectorRegistry, source: CollectorRegistry, prefix: str) -> None:
        self._source = source
        self._prefix = prefix
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return (family for family in self._source.collect() if family.name.startswith(self._prefix))


def add_process_metrics(registry: CollectorRegistry, prefix: str, gpus: list[int]) -> None:
    """Memory and CPU of this process, memory of it and its children, memory of its GPUs.

    Args:
        prefix: `rl_producer` or `rl_trainer`.
        gpus: indexes as nvidia-smi counts.
    """
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    readings = Readings(registry)
    readings.gauge(
        f"{prefix}_resident_memory_bytes",
        "Resident memory of the daemon and of all processes it started.",
        lambda: resident_bytes(os.getpid()),
    )
    readings.gauges(
        f"{prefix}_gpu_memory_used_bytes",
        "Memory in use on each GPU of this daemon, by whatever process. Nothing without GPUs.",
        "gpu",
        lambda: {gpu: memory.used for gpu, memory in _gpu_memory(gpus).items()},
    )
    readings.gauges(
        f"{prefix}_gpu_memory_total_bytes",
        "Memory of each GPU of this daemon.",
        "gpu",
        lambda: {gpu: memory.total for gpu, memory in _gpu_memory(gpus).items()},
    )


def _gpu_memory(gpus: list[int]) -> dict[str, Any]:
    """NVML answers without a CUDA context of its own, which would cost memory on the GPU."""
    if not gpus:
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()  # counts its calls; the first one does the work
        return {str(gpu): pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)) for gpu in gpus}
    except Exception:  # a driver that does not answer must not cost the other metrics
        return {}
