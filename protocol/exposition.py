"""The HTTP port of a daemon: `/metrics` for Prometheus, `/healthz` and `/readyz` with reasons in JSON.

Guarantee: it answers GET of these three and nothing else, on threads of its own, and a client that says nothing is hung up on.
Where it listens stands in `RUN_DIR/metrics/` as long as it does, in the form that Prometheus' file discovery reads.
"""

import contextlib
import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, generate_latest

from protocol.errors import ConfigError, EndpointInUseError
from protocol.health import Findings, Health

_CLIENT_TIMEOUT_S = 5.0
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"  # the OpenMetrics encoder would make `vllm_` of `vllm:`
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  compared with, not bound to


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    registry: CollectorRegistry
    health: Health

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(HTTPStatus.OK, _TEXT_FORMAT, generate_latest(self.server.registry))
        elif path == "/healthz":
            self._findings(self.server.health.alive())
        elif path == "/readyz":
            self._findings(self.server.health.ready())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics /healthz /readyz\n")

    def _findings(self, findings: Findings) -> None:
        fine = not any(findings.values())
        body = {"status": "ok" if fine else "failing", "checks": {name: why or "ok" for name, why in findings.items()}}
        status = HTTPStatus.OK if fine else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, "application/json", json.dumps(body, indent=1).encode() + b"\n")

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def serve(
    registry: CollectorRegistry, health: Health, host: str, port: int, *, key: str, job: str, name: str, folder: Path
) -> Iterator[str]:
    """Serves until the context ends; gives the address as HOST:PORT.

    Args:
        port: 0 takes a free one.
        key: configuration key of the port, for messages.
        job: `rl-producer` or `rl-trainer`, Prometheus' job label.
        name: of this daemon, its `daemon` label.
        folder: where the address is written.

    Raises:
        EndpointInUseError: another process has the port.
        ConfigError: this machine has no such address, or the port is not allowed.
    """
    server = _bound(host, port, key)
    server.registry, server.health = registry, health
    reachable = socket.gethostname() if host in _WILDCARDS else host
    address = f"[{reachable}]" if ":" in reachable else reachable
    address = f"{address}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="exposition", daemon=True)
    thread.start()
    try:
        with announced(folder, job, name, address):
            yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _bound(host: str, port: int, key: str) -> _Server:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("_FamilyServer", (_Server,), {"address_family": family})
    try:
        server: _Server = kind((host, port), _Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EndpointInUseError(
                f"observability.{key}: {host}:{port} is in use by another process; choose another port, or 0 for a free one"
            ) from error
        raise ConfigError(
            f"observability.metrics_host, {key}: cannot listen at {host}:{port}: {error.strerror or error}"
        ) from error
    return server


@contextlib.contextmanager
def announced(folder: Path, job: str, name: str, address: str) -> Iterator[None]:
    """Has the address in a file of `folder` until the context ends. On a full disk it is not announced, but served all the
    same."""
    file = folder / f"{job}-{name}.json"
    partial = file.with_suffix(".partial")
    owner = {"host": socket.gethostname(), "daemon": name, "job": job, "pid": str(os.getpid())}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left(folder)
        partial.write_text(json.dumps([{"targets": [address], "labels": owner}]), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise ConfigError(f"run_dir: {error.filename or folder} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        for left in (file, partial):
            left.unlink(missing_ok=True)


def _remove_left(folder: Path) -> None:
    """What killed daemons of this host left."""
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            labels = json.loads(file.read_text(encoding="utf-8"))[0]["labels"]
            if labels["host"] == socket.gethostname() and not psutil.pid_exists(int(labels["pid"])):
                file.unlink()
