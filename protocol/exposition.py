"""The HTTP port that both daemons open first, with `/metrics`, `/targets` for Prometheus, `/status` for
`slipstream status`, `/healthz` and `/readyz`.

Guarantee: it answers GET of these five and nothing else. It has a thread and a `ConnectionLimiter` of its own, so that neither
the daemon's loops nor slow clients delay an answer. Each of the pages is read on one more thread; while a page takes long to
read, requests for it get a 503 and the other pages are served as usual. The address is in `RUN_DIR/metrics/` while the port is
open, in the form that Prometheus' file discovery reads. `/targets` has the daemon itself and, at a trainer, the connected
producers that others can reach.
"""

import asyncio
import contextlib
import copy
import ipaddress
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.gpu.nvml import gpu_facts
from protocol.runtime import logs
from protocol.runtime.files import ignore_disk_full, staged
from protocol.runtime.health import Findings, Health, Notifier
from protocol.runtime.http_server import REASONS, ConnectionLimiter, Reason, Server, listen
from protocol.runtime.json_lines import encode_page
from protocol.runtime.logs import Throttle
from protocol.runtime.metrics import STATUS_PATH, Readings, Status, read_status
from protocol.runtime.processes import resident_bytes

logger = logging.getLogger(__name__)

TARGETS_PATH = "/targets"


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


_HEADERS_S = 5.0
_READING_S = 10.0
_ANSWER_S = 40.0
_MAX_CONNECTIONS = 64
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  compared with, not bound to


def _findings(look: Callable[[], Findings]) -> Response:
    findings = look()
    fine = not any(findings.values())
    body = {"status": "ok" if fine else "failing", "checks": {name: why or "ok" for name, why in findings.items()}}
    return Response(encode_page(body), 200 if fine else 503, media_type="application/json")


class _Reader:
    """Reads a page on a thread, once for all who ask meanwhile."""

    def __init__(self, read: Callable[[], Response]) -> None:
        self._read = read
        self._reading: asyncio.Future[Response] | None = None

    async def page(self) -> Response:
        """Return the page. If reading takes long, raise `TimeoutError`; the reading goes on, and no other of the page begins."""
        if self._reading is None or self._reading.done():
            reading = asyncio.get_running_loop().create_future()
            # No executor: the end of the process would wait for one of its threads that hangs.
            threading.Thread(target=self._run, args=(reading,), name="reading", daemon=True).start()
            self._reading = reading
        return await asyncio.wait_for(asyncio.shield(self._reading), _READING_S)

    def _run(self, reading: "asyncio.Future[Response]") -> None:
        try:
            settle = partial(reading.set_result, self._read())
        except Exception as error:
            settle = partial(reading.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the daemon has ended meanwhile
            reading.get_loop().call_soon_threadsafe(settle)


class _LabelledByRun(Collector):
    """The metrics of a registry with the label `run`, by which rules and dashboards tell runs apart, as soon as it is known."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        run = logs.bound("run")
        for metric in self._registry.collect():
            if run is not None:
                metric = copy.copy(metric)
                metric.samples = [sample._replace(labels={"run": run} | sample.labels) for sample in metric.samples]
            yield metric


class _Application:
    """The ASGI application. That of prometheus_client reads on the event loop, where it would delay `/healthz`, and lets
    Prometheus choose OpenMetrics, whose encoder renames `vllm:` to `vllm_`."""

    def __init__(
        self, registry: CollectorRegistry, health: Health, status: Callable[[], Status], targets: Targets
    ) -> None:
        labelled = _LabelledByRun(registry)
        self._readers = {
            "/metrics": _Reader(lambda: Response(generate_latest(labelled), media_type=_TEXT_FORMAT)),
            STATUS_PATH: _Reader(lambda: Response(msgspec.json.encode(status()), media_type="application/json")),
            TARGETS_PATH: _Reader(lambda: Response(msgspec.json.encode(targets.read()), media_type="application/json")),
            "/healthz": _Reader(lambda: _findings(health.alive)),
            "/readyz": _Reader(lambda: _findings(health.ready)),
        }
        self._warn = Throttle(logger)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._response(scope["method"], scope["path"])
        await response(scope, receive, send)

    async def _response(self, method: str, path: str) -> Response:
        reader = self._readers.get(path)
        if reader is None:
            return PlainTextResponse(" ".join(self._readers) + "\n", 404)
        if method != "GET":
            return PlainTextResponse("GET\n", 405, {"allow": "GET"})
        try:
            return await reader.page()
        except TimeoutError:
            self._warn("slow", f"{path} has not been read in {_READING_S:g} s")
            return PlainTextResponse("it takes long to read\n", 503)
        except Exception as error:
            self._warn("failed", f"{path} cannot be read: {type(error).__name__}: {error}", logging.ERROR)
            return PlainTextResponse("the daemon's log says why\n", 500)


class Watch(NamedTuple):
    registry: CollectorRegistry
    health: Health
    targets: Targets
    address: str  # at which it is served, HOST:PORT


@contextlib.contextmanager
def watched(config: RunConfig, job: str, gpus: list[int], name: str = "") -> Iterator[Watch]:
    """Serve metrics and health of `job`, `rl-producer` or `rl-trainer`, until the context ends. The daemon's default `name`
    is made of host and process."""
    settings = config.observability
    key = f"{job.removeprefix('rl-')}_metrics_port"
    port = getattr(settings, key)
    if job == "rl-producer" and gpus and port:
        port += gpus[0]
    registry, health = CollectorRegistry(), Health(settings.unresponsive_after_s, Notifier.from_environment())
    add_process_metrics(registry, job.replace("-", "_"), gpus)
    name = name or f"{socket.gethostname()[:64]}-{os.getpid()}"
    folder = Path(config.run_dir) / "metrics"
    targets = Targets(os.path.abspath(config.run_dir))
    with serve(
        registry, health, targets, settings.metrics_host, port, key=key, job=job, name=name, folder=folder
    ) as address:
        yield Watch(registry, health, targets, address)


def add_watch_metrics(registry: CollectorRegistry, prefix: str, health: Health, refused: "Counter[Reason]") -> None:
    """Show the checks of `/healthz` and the connections that the port refuses. `prefix` is `rl_producer` or `rl_trainer`."""
    readings = Readings(registry)
    readings.gauges(
        f"{prefix}_check_failing",
        "1 while this check of /healthz fails.",
        "check",
        lambda: {name: why is not None for name, why in health.alive().items()},
    )
    readings.counters(
        f"{prefix}_metrics_connections_refused_total",
        "Connections to the metrics port that were closed.",
        "reason",
        lambda: {str(reason): refused[reason] for reason in REASONS},
    )


@contextlib.contextmanager
def serve(
    registry: CollectorRegistry,
    health: Health,
    targets: Targets,
    host: str,
    port: int,
    *,
    key: str,
    job: str,
    name: str,
    folder: Path,
) -> Iterator[str]:
    """Serve until the context ends; gives the address as HOST:PORT, which is also in `folder`. Port 0 takes a free one, and
    `key` names it in messages. `job` and `name` are Prometheus' labels `job` and `daemon`."""
    listener = listen(host, port, "observability.metrics_host", f"observability.{key}")
    reachable = socket.gethostname() if host in _WILDCARDS else host
    address = f"[{reachable}]" if ":" in reachable else reachable
    address = f"{address}:{listener.getsockname()[1]}"
    refused: Counter[Reason] = Counter()
    add_watch_metrics(registry, job.replace("-", "_"), health, refused)
    limiter = ConnectionLimiter(_HEADERS_S, _ANSWER_S, _MAX_CONNECTIONS, lambda reason: refused.update((reason,)))
    status = partial(read_status, registry, health, job, name, time.time())
    targets.add(lambda: [Target(address, job, name, socket.gethostname())])
    server = Server(_Application(registry, health, status, targets), limiter)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), name="exposition", daemon=True)
    thread.start()
    try:
        with announced(folder, job, name, address):
            yield address
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def announced(folder: Path, job: str, name: str, address: str) -> Iterator[None]:
    """Keep the address in a file of `folder` until the context ends; do without the file on a full disk."""
    file = folder / f"{job}-{name}.json"
    owner = {"host": socket.gethostname(), "daemon": name, "job": job, "pid": str(os.getpid())}
    try:
        with ignore_disk_full():
            folder.mkdir(parents=True, exist_ok=True)
            _remove_left(folder)
            with staged(file) as partial:
                partial.write_text(json.dumps([{"targets": [address], "labels": owner}]), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run_dir: {error.filename or folder} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _remove_left(folder: Path) -> None:
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            labels = json.loads(file.read_text(encoding="utf-8"))[0]["labels"]
            if labels["host"] == socket.gethostname() and not psutil.pid_exists(int(labels["pid"])):
                file.unlink()


def add_process_metrics(registry: CollectorRegistry, prefix: str, gpus: list[int]) -> None:
    """Memory and CPU of this process, memory of it and its children, memory of its GPUs, by their indexes. `prefix` is
    `rl_producer` or `rl_trainer`."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    readings = Readings(registry)
    readings.gauge(
        f"{prefix}_resident_memory_bytes",
        "Resident memory of the daemon and its children.",
        lambda: resident_bytes(os.getpid()),
    )
    for what, documentation in (
        ("used", "Memory that any process uses on this daemon's GPUs."),
        ("total", "Memory of each GPU of this daemon."),
    ):
        name, read = f"{prefix}_gpu_memory_{what}_bytes", partial(_gpu_memory, gpus, what)
        readings.gauges(name, documentation, "gpu", read)


def _gpu_memory(gpus: list[int], what: str) -> dict[str, float]:
    found = [facts for gpu in gpus if (facts := gpu_facts(gpu)) is not None]
    return {str(gpu.index): gpu.used_bytes if what == "used" else gpu.total_bytes for gpu in found}
