"""Asks all daemons of a run for their status at the same time.

Guarantee: a daemon that does not answer, answers nonsense or never finishes takes at most some seconds and raises no error. Each
address is asked once.
"""

import http.client
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from protocol.runtime.metrics import STATUS_PATH as PATH
from protocol.runtime.metrics import Status
from slipstream.run_reader import DaemonAddress, RunReader

TIMEOUT_S = 3.0
_MOST_BYTES = 16 * 2**20
_STRANGER = "what answers there is no daemon of Slipstream"


class Answer(NamedTuple):
    """The status of one daemon, or the reason why there is none."""

    source: DaemonAddress
    at: float  # Unix time
    status: Status | None = None
    error: str | None = None

    @property
    def job(self) -> str | None:
        return self.source.job if self.status is None else self.status.job


def find_daemons(run: RunReader | None, addresses: Iterable[str]) -> list[DaemonAddress]:
    """The trainer first, then producers by name, then what was given by hand."""
    announced = list(run.daemons()) if run else []
    announced.sort(key=lambda source: (source.job != "rl-trainer", source.daemon or ""))
    known = {source.address for source in announced if not source.process_gone}
    return announced + [DaemonAddress(address) for address in dict.fromkeys(addresses) if address not in known]


def ask(sources: Sequence[DaemonAddress]) -> list[Answer]:
    if not sources:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(sources))) as pool:
        return list(pool.map(_ask, sources))


def _ask(source: DaemonAddress) -> Answer:
    at = time.time()
    if source.process_gone:
        return Answer(source, at, error="the process exited unexpectedly")
    try:
        code, body = _get(source.address)
        if code != http.client.OK:
            return Answer(source, at, error=f"{PATH} answered with status {code}")
        return Answer(source, at, msgspec.json.decode(body, type=Status))
    except OSError as error:
        return Answer(source, at, error=(error.strerror or str(error) or type(error).__name__).lower())
    except (http.client.HTTPException, ValueError):
        return Answer(source, at, error=_STRANGER)


def _get(address: str) -> tuple[int, bytes]:
    place = urlsplit(f"//{address}")
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", PATH, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read(_MOST_BYTES)
    finally:
        connection.close()
