"""Numbers that a daemon shows: metrics that are read when they are scraped, and the same numbers as the document `/status`.

Guarantee: a number that a part keeps anyway is read at the scrape and costs nothing before. Every label value that is known
beforehand is there from the start, and no label grows with the run (no step, version, prompt or group is a label). Every number
that the daemon declares is in its status, under its name without `rl_trainer_` or `rl_producer_` in front and `_total` behind: a
number with labels is an object by their values, a histogram has its `_sum` and `_count`, and a number that is not finite is left
out.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from protocol.runtime.health import Health

disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for every counter

Number = Callable[[], float | None]  # None: there is none, and no sample
Numbers = Callable[[], Mapping[str, float] | Mapping[tuple[str, str], float]]  # by label value, or values
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Readings(Collector):
    """Numbers that other parts keep. A counter's name ends in `_total`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._readings: list[tuple[_Family, str, str, tuple[str, ...], Number | Numbers]] = []
        registry.register(self)

    def counter(self, name: str, documentation: str, read: Number) -> None:
        self._readings.append((CounterMetricFamily, name, documentation, (), read))

    def counters(self, name: str, documentation: str, labels: str | tuple[str, ...], read: Numbers) -> None:
        names = (labels,) if isinstance(labels, str) else labels
        self._readings.append((CounterMetricFamily, name, documentation, names, read))

    def gauge(self, name: str, documentation: str, read: Number) -> None:
        self._readings.append((GaugeMetricFamily, name, documentation, (), read))

    def gauges(self, name: str, documentation: str, labels: str | tuple[str, ...], read: Numbers) -> None:
        names = (labels,) if isinstance(labels, str) else labels
        self._readings.append((GaugeMetricFamily, name, documentation, names, read))

    def collect(self) -> Iterator[Metric]:
        for kind, name, documentation, names, read in self._readings:
            family, value = kind(name, documentation, labels=names), read()
            for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                if number is None:
                    continue
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


STATUS_PATH = "/status"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one daemon. Times are Unix times."""

    job: str  # `rl-producer` or `rl-trainer`
    daemon: str  # its name, as in `RUN_DIR/metrics/`
    at: float
    started: float  # since when it serves, which tells its process from an earlier one at the same address
    not_ready: dict[str, str] = {}  # the reasons of `/readyz`, by what was looked at
    info: dict[str, str] = {}  # what describes the daemon and is no number, such as its release
    numbers: dict[str, int | float | dict[str, int | float | dict[str, int | float]]] = {}


def read_status(registry: CollectorRegistry, health: Health, job: str, daemon: str, started: float) -> Status:
    prefix = f"{job.replace('-', '_')}_"
    info: dict[str, str] = {}
    numbers: dict[str, Any] = {}
    for sample in _samples(registry, prefix):
        name = sample.name.removeprefix(prefix).removesuffix("_total")
        if name == "info":
            info |= sample.labels
        else:
            *path, last = name, *sample.labels.values()
            place = numbers
            for key in path:
                place = place.setdefault(key, {})
            place[last] = int(sample.value) if sample.value == int(sample.value) else sample.value
    not_ready = {name: why for name, why in health.ready().items() if why is not None}
    return Status(
        job=job, daemon=daemon, at=time.time(), started=started, not_ready=not_ready, info=info, numbers=numbers
    )


def _samples(registry: CollectorRegistry, prefix: str) -> Iterator[Sample]:
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.startswith(prefix) and not sample.name.endswith("_bucket") and math.isfinite(sample.value):
                yield sample
