import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.runtime.health import Notifier
from protocol.runtime.logs import running_under_systemd


class Manager:
    """The listening end, as systemd has one."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return messages


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    result = Manager(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    with result.socket:
        yield result


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def notifier(manager: Manager) -> Notifier:
    return Notifier.from_environment()


def test_every_message_is_what_sd_notify_specifies(manager: Manager, notifier: Notifier) -> None:
    notifier.extend_timeout(90.5)
    notifier.ready("listening")
    notifier.watchdog()
    notifier.status("step 3")
    notifier.stopping("writing a checkpoint")
    assert manager.heard() == [
        "EXTEND_TIMEOUT_USEC=90500000",
        "READY=1\nSTATUS=listening",
        "WATCHDOG=1",
        "STATUS=step 3",
        "STOPPING=1\nSTATUS=writing a checkpoint",
    ]


def test_an_abstract_socket_is_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"slipstream-test{tmp_path}"
    manager = Manager(f"\0{name}")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    notifier = Notifier.from_environment()
    notifier.ready("up")
    assert manager.heard() == ["READY=1\nSTATUS=up"]
    manager.socket.close()


def test_signs_of_life_go_out_at_most_thrice_per_interval(
    manager: Manager, notifier: Notifier, clock: list[float]
) -> None:
    for now in (100.0, 100.1, 109.9, 110.0, 110.1, 120.5):  # the interval is 30 s
        clock[0] = now
        notifier.watchdog()
    assert manager.heard() == ["WATCHDOG=1"] * 3


@pytest.mark.parametrize(
    ("variable", "value", "heard"),
    [
        ("WATCHDOG_PID", "1", []),
        ("WATCHDOG_PID", "", ["WATCHDOG=1"]),
        ("WATCHDOG_USEC", "0", []),
        ("WATCHDOG_USEC", "x", []),
    ],
)
def test_signs_of_life_are_sent_where_this_process_is_watched(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, heard: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    notifier = Notifier.from_environment()
    notifier.watchdog()
    notifier.status("here")
    assert manager.heard() == [*heard, "STATUS=here"]


def test_children_get_none_of_the_variables(notifier: Notifier) -> None:
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys()


@pytest.mark.parametrize("name", [None, "", "relative/path", "/nobody/listens/here", "/" + "long" * 50])
def test_where_nobody_listens_nothing_happens(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    if name is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", name)
    notifier = Notifier.from_environment()
    notifier.ready("up")
    notifier.watchdog()
    notifier.extend_timeout(float("inf"))
    notifier.extend_timeout(float("nan"))
    notifier.stopping("down")


def test_a_full_socket_neither_blocks_nor_loses_that_the_daemon_is_ready(manager: Manager, notifier: Notifier) -> None:
    for _ in range(100_000):
        if not notifier._send("STATUS=filling"):
            break
    else:
        raise AssertionError("the socket never filled up")
    notifier.ready("up")
    notifier.watchdog()
    assert set(manager.heard()) == {"STATUS=filling"}
    notifier.watchdog()
    assert manager.heard() == ["READY=1\nSTATUS=up\nWATCHDOG=1"]


def test_a_status_cannot_smuggle_in_another_message(manager: Manager, notifier: Notifier) -> None:
    notifier.status("one\nSTOPPING=1\r\n two\udc80" + "x" * 5000)
    (message,) = manager.heard()
    assert message.startswith("STATUS=one STOPPING=1 two?xxx")
    assert len(message) == len("STATUS=") + 1000


def test_standard_error_into_the_journal_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "other").open("w") as other:
        facts = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino}")
        assert running_under_systemd(journal.fileno())
        assert not running_under_systemd(other.fileno())
        monkeypatch.delenv("JOURNAL_STREAM")
        assert not running_under_systemd(journal.fileno())
    assert not running_under_systemd(10_000)
