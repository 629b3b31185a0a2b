"""What a server's scheduler says of itself, and how much of that is this producer's doing.

Guarantee: other clients' preemptions are not counted as ours: of each a producer has its share of the requests in the server. A
counter that begins again, and a metric that is not there or cannot be, count nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from producer.state import EngineLoad

_CACHE, _RUNNING, _WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
_PREEMPTIONS = "vllm:num_preemptions_total"
_NEEDED = (_CACHE, _RUNNING, _WAITING, _PREEMPTIONS)
_MOST = 2.0**53


def samples_of(metrics: str, names: tuple[str, ...]) -> list[Sample]:
    """Those of the text of `/metrics` whose names begin so; none where the text is malformed."""
    lines = [line for line in metrics.splitlines() if line.startswith(names)]
    try:
        families = list(text_string_to_metric_families("\n".join(lines)))
    except Exception:  # whatever the parser makes of what somebody else wrote
        return []
    return [sample for family in families for sample in family.samples]


def scheduler_load(metrics: str) -> EngineLoad | None:
    """From the text of `/metrics`, with one line for each engine of the server; None where it does not say."""
    found: dict[str, list[float]] = {name: [] for name in _NEEDED}
    for sample in samples_of(metrics, _NEEDED):
        found.get(sample.name, []).append(sample.value)
    if not all(values and all(0 <= value < _MOST for value in values) for values in found.values()):
        return None
    running, waiting, preemptions = (round(sum(found[name])) for name in _NEEDED[1:])
    return EngineLoad(max(found[_CACHE]), running, waiting, preemptions)


@dataclass
class OwnLoad:
    """Of one server, as far as it was told."""

    load: EngineLoad | None = None
    _before: int | None = None  # preemptions, as the server told them last
    _own: float = 0.0  # of them

    def note(self, told: EngineLoad | None, in_flight: int) -> None:
        """What a server says now, with so many completions of this producer in it."""
        if told is None:
            return
        if self._before is not None and told.preemptions > self._before:
            requests = max(1, in_flight, told.running + told.waiting)
            self._own += (told.preemptions - self._before) * in_flight / requests
        self._before = told.preemptions
        self.load = EngineLoad(told.kv_cache_usage, told.running, told.waiting, int(self._own))


def joined(loads: Iterable[EngineLoad | None]) -> EngineLoad | None:
    """Of several servers that take the same number of groups; None if none says anything."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return EngineLoad(
        max(load.kv_cache_usage for load in known),
        sum(load.running for load in known),
        sum(load.waiting for load in known),
        sum(load.preemptions for load in known),
    )
