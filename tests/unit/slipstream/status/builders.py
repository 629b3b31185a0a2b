"""What daemons say, for tests."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from protocol.runtime.metrics import Status
from slipstream.run_reader import DaemonAddress
from slipstream.status.daemons import Answer
from slipstream.status.reading import ProducerView, TrainerView, View

TRAINER = DaemonAddress("127.0.0.1:9100", "rl-trainer", "host-1")
PRODUCER = DaemonAddress("127.0.0.1:9200", "rl-producer", "gpu0-7-ab")

SAID = msgspec.json.decode((Path(__file__).parent / "documents.json").read_bytes(), type=dict[str, Status])
"""The status documents of both daemons as this release writes them. Later ones must read them too."""


def answer(
    source: DaemonAddress = TRAINER,
    *,
    at: float = 1000.0,
    started: float = 800.0,
    not_ready: dict[str, str] | None = None,
    numbers: dict[str, Any] | None = None,
    **others: Any,
) -> Answer:
    """What a daemon says: `numbers`, or those of its document with `others` in place of some."""
    said = SAID[source.job or "rl-trainer"]
    assert others.keys() <= said.numbers.keys()
    numbers = said.numbers | others if numbers is None else numbers
    return Answer(source, at, replace(said, at=at, started=started, not_ready=not_ready or {}, numbers=numbers))


def seen(trainer: dict[str, Any] | None = None, *producers: ProducerView, **fields: Any) -> View:
    """A view with a trainer of these numbers."""
    shown = None if trainer is None else TrainerView(**{"address": "h:1", "daemon": "t"} | trainer)
    return View(**{"at": 1000.0, "trainer": shown, "producers": list(producers), "rewards": {}, "silent": {}} | fields)


def producer(**fields: Any) -> ProducerView:
    return ProducerView(**{"name": "p1", "address": "h:2"} | fields)
