"""What clients of the HTTP port do to it, and what its daemon does: `/healthz` answers all the same."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from protocol import exposition
from protocol.channel.connection_quota import raise_descriptor_limit
from protocol.runtime.http_server import ConnectionLimiter
from tests.unit.protocol.channel_harness import PATIENCE_S, eventually
from tests.unit.protocol.test_exposition import get, health, served


class Port:
    """One that is served, for clients that keep no rules. It is patient, unless a test makes its limits shorter."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.health = health()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exposition, "ConnectionLimiter", self._limit)
            self.address = stack.enter_context(served(folder, self.registry, self.health))
        self._stack = stack

    def _limit(self, _headers_s: float, _answer_s: float, *others: Any) -> ConnectionLimiter:
        self.limiter = ConnectionLimiter(PATIENCE_S, PATIENCE_S, *others)
        return self.limiter

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return self._stack.enter_context(socket.create_connection((host, int(port)), timeout=30.0))

    def say(self, request: bytes) -> bytes:
        """What comes back until it hangs up."""
        client = self.connect()
        answer = b""
        with contextlib.suppress(ConnectionError):
            client.sendall(request)
            while data := client.recv(65_536):
                answer += data
        return answer

    def is_alive(self) -> bool:
        return get(self.address, "/healthz")[0] == 200

    def refused(self, reason: str) -> float:
        return self.registry.get_sample_value("rl_trainer_metrics_connections_refused_total", {"reason": reason}) or 0.0


@pytest.fixture
def port(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.setattr(exposition, "_READING_S", PATIENCE_S)
    return Port(stack, tmp_path)


class Hanging(Collector):
    """A part of the daemon that does not say its number before it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.num_readings = 0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.num_readings += 1
        assert self.let.wait(30.0)
        yield GaugeMetricFamily("rl_trainer_late", "Late.", value=1)


def hung_up(client: socket.socket) -> bool:
    """Whether nothing more comes over it."""
    client.setblocking(False)
    try:
        return client.recv(65_536) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_clients_that_drip_are_hung_up_on_and_take_no_threads(port: Port) -> None:
    before = threading.active_count()
    port.limiter.header_timeout_s = 0.2
    dripping = [port.connect() for _ in range(40)]

    def are_gone() -> bool:
        for client in dripping:
            with contextlib.suppress(OSError):
                client.send(b"x")
        assert threading.active_count() <= before + 1
        return all(hung_up(client) for client in dripping)

    eventually(are_gone, "the end of those that drip")
    assert port.refused("too_slow") == 40
    port.limiter.header_timeout_s = PATIENCE_S
    assert port.is_alive()


@pytest.mark.long
def test_a_thousand_connections_take_no_threads_and_keep_nobody_out(port: Port) -> None:
    raise_descriptor_limit()  # many a shell allows 1,024
    before = threading.active_count()
    idle = [port.connect() for _ in range(1000)]
    for _ in range(5):
        assert port.is_alive()
        assert threading.active_count() <= before + 1
    assert port.refused("too_many_connections") >= 1000 - exposition._MAX_CONNECTIONS
    eventually(lambda: sum(map(hung_up, idle)) >= 1000 - exposition._MAX_CONNECTIONS, "the end of those before")


def test_other_methods_are_refused_with_the_one_there_is(port: Port) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "BREW"):
        answer = port.say(f"{method} /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 405 ")
        assert b"allow: GET" in answer


def test_what_is_no_request_of_a_usual_size_is_refused(port: Port) -> None:
    for number, request in enumerate(
        (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nBig: " + b"x" * 2**20,
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 100_000,
            b"GET /" + b"x" * 2**20,
            b"\x16\x03\x01\x02\0\x01",  # TLS
        ),
        start=1,
    ):
        assert port.say(request)[:13] in (b"HTTP/1.1 400 ", b"")
        assert port.refused("malformed") == number
    assert port.is_alive()


def test_a_body_is_not_waited_for(port: Port) -> None:
    client = port.connect()
    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
    assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
    port.limiter.header_timeout_s = 0.2

    def is_gone() -> bool:
        with contextlib.suppress(OSError):
            client.send(b"x")
        return hung_up(client)

    eventually(is_gone, "the end of a body that drips")


@pytest.mark.long
def test_a_client_that_does_not_take_its_answer_is_cut_off(port: Port) -> None:
    port.limiter.answer_timeout_s = 0.2

    class Large(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            yield GaugeMetricFamily("rl_trainer_large", "x" * 2**24, value=1)

    port.registry.register(Large())
    client = port.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    eventually(lambda: port.refused("too_slow"), "its end")


@pytest.mark.parametrize(
    "hangs",
    ["/metrics", "/status", "/readyz"],
)
def test_a_page_that_cannot_be_read_holds_up_no_other_one(
    port: Port, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Hanging()
    if hangs != "/readyz":
        port.registry.register(part)
    else:
        port.health.started("")
        port.health.check_ready("late", lambda: None if list(part.collect()) else "nothing")
    threads = threading.active_count()
    registered = part.num_readings
    monkeypatch.setattr(exposition, "_READING_S", 0.1)
    assert [get(port.address, hangs)[0] for _ in range(2)] == [503, 503]
    monkeypatch.setattr(exposition, "_READING_S", PATIENCE_S)
    assert port.is_alive()
    assert part.num_readings <= registered + 1
    eventually(lambda: threading.active_count() <= threads + 1, "the end of the thread that read /healthz")
    part.let.set()
    assert get(port.address, hangs)[0] == 200


def test_a_page_that_fails_says_so_and_the_others_come(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Collector):
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> Iterator[GaugeMetricFamily]:
            raise RuntimeError("no number")

    port.registry.register(Broken())
    assert get(port.address, "/metrics")[0] == 500
    assert "/metrics cannot be read: RuntimeError: no number" in caplog.text
    assert port.is_alive()


def test_the_end_waits_for_no_client(stack: ExitStack, tmp_path: Path) -> None:
    with ExitStack() as serving:
        port = Port(serving, tmp_path)
        for request in (b"", b"GET /healthz HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"):
            port.connect().sendall(request)
        began = time.monotonic()
    assert time.monotonic() - began < 10.0
    assert not any(thread.name == "exposition" for thread in threading.enumerate())
