"""The status document: what a daemon says about itself at `/status`, as one JSON object.

Guarantee: every number that the daemon declares as a metric is in it, read where it is kept, under the metric's name without
`rl_trainer_` or `rl_producer_` in front and `_total` behind; so a number is added in one place, its declaration. A number with
labels is an object by their values; a histogram has its `_sum` and `_count`. What is not finite is not known yet and is left
out.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from protocol.service.health import Health

PATH = "/status"

Number = int | float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What one daemon says. Times are Unix times."""

    job: str  # `rl-producer` or `rl-trainer`
    daemon: str  # its name, as in `RUN_DIR/metrics/`
    at: float
    started: float  # since when it serves, which tells its process from an earlier one at the same address
    not_ready: dict[str, str] = {}  # the reasons of `/readyz`, by what was looked at
    info: dict[str, str] = {}  # what describes the daemon and is no number, such as its release
    numbers: dict[str, Number | dict[str, Number | dict[str, Number]]] = {}


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
