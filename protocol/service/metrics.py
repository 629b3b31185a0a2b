"""What the metrics of both daemons have in common: one registry, numbers read when they are scraped, process and GPU memory.

Guarantee: a number that a part keeps anyway is read at the scrape and costs nothing before. Every label value that is known in
advance is there from the start, and no label grows with the run (no step, version, prompt or group is a label).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.gpu.device import gpu_facts
from protocol.processes.tree import resident_bytes

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for every counter, which nobody reads

Number = Callable[[], float]
Numbers = Callable[[], Mapping[str, float] | Mapping[tuple[str, str], float]]  # by label value, or values
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Readings(Collector):
    """Numbers that other parts keep. A counter's name ends in `_total`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._readings: list[tuple[_Family, str, str, tuple[str, ...], Number | Numbers]] = []
        registry.register(self)

    def counter(self, name: str, documentation: str, read: Number) -> None:
        self._readings.append((CounterMetricFamily, name, documentation, (), read))

    def counters(self, name: str, documentation: str, label: str, read: Numbers) -> None:
        self._readings.append((CounterMetricFamily, name, documentation, (label,), read))

    def gauge(self, name: str, documentation: str, read: Number) -> None:
        self._readings.append((GaugeMetricFamily, name, documentation, (), read))

    def gauges(self, name: str, documentation: str, labels: str | tuple[str, ...], read: Numbers) -> None:
        names = (labels,) if isinstance(labels, str) else labels
        self._readings.append((GaugeMetricFamily, name, documentation, names, read))

    def collect(self) -> Iterator[Metric]:
        for kind, name, documentation, names, read in self._readings:
            family, value = kind(name, documentation, labels=names), read()
            for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                family.add_metric((labels,) if isinstance(labels, str) else labels, number)
            yield family


class Reexport(Collector):
    """The families of another registry whose names begin with `prefix`."""

    def __init__(self, registry: CollectorRegistry, source: CollectorRegistry, prefix: str) -> None:
        self._source = source
        self._prefix = prefix
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return (family for family in self._source.collect() if family.name.startswith(self._prefix))


def add_process_metrics(registry: CollectorRegistry, prefix: str, gpus: list[int]) -> None:
    """Memory and CPU of this process, memory of it and its children, memory of its GPUs, by their indexes. `prefix` is
    `rl_producer` or `rl_trainer`."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    readings = Readings(registry)
    readings.gauge(
        f"{prefix}_resident_memory_bytes",
        "Resident memory of the daemon and of all processes it started.",
        lambda: resident_bytes(os.getpid()),
    )
    for what, documentation in (
        ("used", "Memory in use on each GPU of this daemon, by whatever process. Nothing without GPUs."),
        ("total", "Memory of each GPU of this daemon."),
    ):
        name, read = f"{prefix}_gpu_memory_{what}_bytes", partial(_gpu_memory, gpus, what)
        readings.gauges(name, documentation, "gpu", read)


def _gpu_memory(gpus: list[int], what: str) -> dict[str, float]:
    found = [facts for gpu in gpus if (facts := gpu_facts(gpu)) is not None]
    return {str(gpu.index): gpu.used_bytes if what == "used" else gpu.total_bytes for gpu in found}
