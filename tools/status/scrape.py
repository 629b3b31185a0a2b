"""One look at the daemons: `/metrics` and `/readyz` of each, all at once.

Guarantee: a daemon that does not answer, answers nonsense or never ends costs `TIMEOUT_S` per read and no error. Of its numbers
only ours are kept, and of these the finite ones: NaN is what a gauge shows before its first step.
"""

import http.client
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tools.status.sources import Source

TIMEOUT_S = 3.0
_MOST_BYTES = 16 * 2**20
_KEPT = ("rl_trainer", "rl_producer", "process_start_time_seconds")

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]


@dataclass(frozen=True)
class Answer:
    """What one daemon said, or why it said nothing.

    Args:
        at: Unix time.
        samples: empty if it did not answer.
        checks: of `/readyz`: what was looked at, and `ok` or what is wrong.
        error: why there are no samples.
    """

    source: Source
    at: float
    samples: Samples = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def job(self) -> str | None:
        """What it shows says what it is."""
        for prefix, job in (("rl_trainer_", "rl-trainer"), ("rl_producer_", "rl-producer")):
            if any(name.startswith(prefix) for name, _ in self.samples):
                return job
        return self.source.job

    def value(self, name: str, **labels: str) -> float | None:
        """None if it is not shown."""
        return self.samples.get((name, frozenset(labels.items())))

    def by(self, name: str, label: str) -> dict[str, float]:
        """By the label's value."""
        return {dict(labels)[label]: value for (found, labels), value in self.samples.items() if found == name}

    def told(self, name: str, label: str) -> str | None:
        """The text of an info metric."""
        return next(iter(self.by(name, label)), None)


def look(sources: Sequence[Source]) -> list[Answer]:
    """Asks all of them at the same time."""
    if not sources:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(sources))) as pool:
        return list(pool.map(_ask, sources))


def parse(text: str) -> Samples:
    """
    Raises:
        ValueError: it is not Prometheus' text format.
    """
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith(_KEPT)
        for sample in family.samples
        if math.isfinite(sample.value)
    }


def _ask(source: Source) -> Answer:
    at = time.time()
    if source.process_gone:
        return Answer(source, at, error="gone without a word, perhaps killed")
    try:
        status, body = _get(source.address, "/metrics")
        if status != http.client.OK:
            return Answer(source, at, error=f"/metrics answered with status {status}")
        samples = parse(body)
        if not any(name.startswith(_KEPT[:2]) for name, _ in samples):
            return Answer(source, at, error="what answers there is no daemon of Slipstream")
        return Answer(source, at, samples, _checks(_get(source.address, "/readyz")[1]))
    except OSError as error:
        return Answer(source, at, error=(error.strerror or str(error) or type(error).__name__).lower())
    except (http.client.HTTPException, ValueError, LookupError) as error:
        return Answer(source, at, error=f"it answered with something else than metrics ({type(error).__name__})")


def _get(address: str, path: str) -> tuple[int, str]:
    place = urlsplit(f"//{address}")
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read(_MOST_BYTES).decode("utf-8", "replace")
    finally:
        connection.close()


def _checks(body: str) -> dict[str, str]:
    checks = json.loads(body)["checks"]
    if not isinstance(checks, dict):
        raise ValueError("checks")
    return {str(name): str(why) for name, why in checks.items()}
