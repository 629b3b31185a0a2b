"""What systemd is told of a daemon's life: sd_notify(3) without a library.

Guarantee: nothing here raises or blocks, and without a service manager nothing happens. The variables that name the manager's
socket are removed from the environment, so no child process speaks for the daemon. READY and STOPPING that a full socket refused
are sent with the next sign of life.
"""

import os
import socket
import time

_MAX_STATUS_CHARS = 1000  # systemd drops datagrams above 4096 bytes
_MAX_EXTENSION_S = 7 * 24 * 3600.0


class Notifier:
    """`address` is a path, or a name in the abstract namespace with a leading NUL byte; None if nobody listens. The manager
    kills a daemon that is silent for longer than `watchdog_interval_s`; with None it does not watch."""

    def __init__(self, address: str | None, watchdog_interval_s: float | None = None) -> None:
        self._address = address
        self._beat_every_s = None if watchdog_interval_s is None else watchdog_interval_s / 3
        self._beat_at = -float("inf")
        self._refused = ""

    @classmethod
    def from_environment(cls) -> "Notifier":
        """Reads the variables of sd_notify(3) and sd_watchdog_enabled(3), and removes them. A second notifier sends nothing."""
        name = os.environ.pop("NOTIFY_SOCKET", "")
        interval_us = os.environ.pop("WATCHDOG_USEC", "")
        watched_pid = os.environ.pop("WATCHDOG_PID", "")
        address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else None
        watched = watched_pid in ("", str(os.getpid())) and interval_us.isdecimal() and int(interval_us) > 0
        return cls(address, int(interval_us) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        """Start-up is over; from now on the watchdog watches."""
        self._announce(f"READY=1\n{_status(status)}")

    def stopping(self, status: str) -> None:
        """Shutting down has begun; from now on the watchdog does not watch."""
        self._announce(f"STOPPING=1\n{_status(status)}")

    def watchdog(self) -> None:
        """One sign of life, for every turn of a loop. At most three are sent per interval."""
        now = time.monotonic()
        if self._beat_every_s is None or now - self._beat_at < self._beat_every_s:
            return
        if self._send(f"{self._refused}WATCHDOG=1"):
            self._beat_at, self._refused = now, ""

    def extend_timeout(self, seconds: float) -> None:
        """While starting or stopping: the manager waits so long from now, or until this is called again."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(min(_MAX_EXTENSION_S, seconds) * 1e6)}")

    def status(self, text: str) -> None:
        """The line that `systemctl status` shows."""
        self._send(_status(text))

    def _announce(self, message: str) -> None:
        self._refused = "" if self._send(message) else f"{message}\n"

    def _send(self, message: str) -> bool:
        if self._address is None:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
                out.sendto(message.encode(errors="replace"), self._address)
        except OSError:  # the manager is busy, or gone
            return False
        return True


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:_MAX_STATUS_CHARS]}"


def running_under_systemd(descriptor: int = 2) -> bool:
    """Whether this stream (standard error by default) goes to the journal, by systemd.exec(5)'s JOURNAL_STREAM."""
    try:
        facts = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"
