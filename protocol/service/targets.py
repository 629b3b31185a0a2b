"""Where the daemons of a run serve their metrics: the page `/targets`, in the form of Prometheus' HTTP discovery.

Guarantee: it has the daemon itself and, at a trainer, the producers that are connected and that others can reach; so it is
as long as the fleet is large, and a producer is found wherever somebody placed it.
"""

import ipaddress
from collections.abc import Callable, Iterable
from typing import NamedTuple

from protocol.service import logs

PATH = "/targets"


class Target(NamedTuple):
    address: str  # HOST:PORT
    job: str
    daemon: str
    host: str  # "": unknown


class Targets:
    """Parts of a daemon add what they know of. Any thread reads it."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._sources: list[Callable[[], Iterable[Target]]] = []

    def add(self, source: Callable[[], Iterable[Target]]) -> None:
        self._sources.append(source)

    def read(self) -> list[dict[str, object]]:
        """Return the list in Prometheus' form. Rules and dashboards tell runs apart by `run`, which is "" until it is known."""
        run = logs.bound("run") or ""
        found = [target for source in self._sources for target in source()]
        return [
            {
                "targets": [target.address],
                "labels": {"job": target.job, "daemon": target.daemon, "host": target.host}
                | {"run": run, "run_dir": self._run_dir},
            }
            for target in found
        ]


def reachable(address: str, endpoint: str) -> str:
    """The address of a producer's metrics as its trainer may hand it on; "" where only the producer's own host could reach it.

    Args:
        address: HOST:PORT.
        endpoint: where the producer finds its trainer.
    """
    is_here = endpoint.startswith("ipc://") or _is_loopback(endpoint.removeprefix("tcp://"))
    return address if is_here or not _is_loopback(address) else ""


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
