"""The health of a daemon: whether it is alive and can work, with reasons, for `/healthz`, `/readyz` and systemd's watchdog.

Guarantee: `alive` fails when a loop that has begun to beat has not beaten for `unresponsive_after_s`, or when a check fails.
`ready` fails for the same reasons, while the daemon starts or stops, and when one of its own checks fails. Only the beats of
working loops reach the watchdog. `Notifier` neither raises nor blocks, and does nothing without a service manager; it removes the
variables that name the manager's socket, so no child process speaks for the daemon. Any thread may use `Health`. The first loop
that is late has the stacks of all threads in the log.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protocol.runtime.stacks import log_stacks

_MAX_STATUS_CHARS = 1000  # systemd drops datagrams above 4096 bytes
_MAX_EXTENSION_S = 7 * 24 * 3600.0


class Notifier:
    """`address` is a path, or a name in the abstract namespace with a leading NUL byte; None without a manager. The manager
    kills a daemon that is silent for longer than `watchdog_interval_s`; with None it does not watch."""

    def __init__(self, address: str | None, watchdog_interval_s: float | None = None) -> None:
        self._address = address
        self._beat_every_s = None if watchdog_interval_s is None else watchdog_interval_s / 3
        self._beat_at = -float("inf")
        self._refused = ""

    @classmethod
    def from_environment(cls) -> "Notifier":
        """Read the variables of sd_notify(3) and sd_watchdog_enabled(3), and removes them. A second notifier sends nothing."""
        name = os.environ.pop("NOTIFY_SOCKET", "")
        interval_us = os.environ.pop("WATCHDOG_USEC", "")
        watched_pid = os.environ.pop("WATCHDOG_PID", "")
        address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else None
        watched = watched_pid in ("", str(os.getpid())) and interval_us.isdecimal() and int(interval_us) > 0
        return cls(address, int(interval_us) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        """Announce that start-up is over; from now on the watchdog watches."""
        self._announce(f"READY=1\n{_status(status)}")

    def stopping(self, status: str) -> None:
        """Announce that shutting down has begun; from now on the watchdog does not watch."""
        self._announce(f"STOPPING=1\n{_status(status)}")

    def watchdog(self) -> None:
        """Send a sign of life, for every turn of a loop. At most three are sent per interval."""
        now = time.monotonic()
        if self._beat_every_s is None or now - self._beat_at < self._beat_every_s:
            return
        if self._send(f"{self._refused}WATCHDOG=1"):
            self._beat_at, self._refused = now, ""

    def extend_timeout(self, seconds: float) -> None:
        """Extend the time to start or stop: the manager waits `seconds` from now, or until the next call."""
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


Check = Callable[[], str | None]
"""Returns what is wrong, or None."""

Findings = dict[str, str | None]
"""What is wrong, or None, by what was checked."""

_EXTEND_EVERY_S = 10.0
_EXTEND_BY_S = 60.0


@dataclass
class Health:
    unresponsive_after_s: float
    notifier: Notifier
    clock: Callable[[], float] = time.monotonic
    _beats: dict[str, float] = field(default_factory=dict, init=False)
    _alive_checks: dict[str, Check] = field(default_factory=dict, init=False)
    _ready_checks: dict[str, Check] = field(default_factory=dict, init=False)
    _phase: str | None = field(default="starting", init=False)
    _has_logged: bool = field(default=False, init=False)

    def beat(self, loop: str) -> None:
        """The loop of this name has made another turn. Costs a microsecond."""
        self._beats[loop] = self.clock()
        if any(self._late_loops().values()):
            return
        self.notifier.watchdog()
        if self._phase == "stopping":
            self.notifier.extend_timeout(_EXTEND_BY_S)

    def end(self, loop: str) -> None:
        self._beats.pop(loop, None)

    def check_alive(self, name: str, check: Check) -> None:
        """Add a check to both answers."""
        self._alive_checks[name] = check

    def check_ready(self, name: str, check: Check) -> None:
        self._ready_checks[name] = check

    @contextlib.contextmanager
    def starting(self, what: str, limit_s: float) -> Iterator[None]:
        """Extend systemd's timeout while the daemon does `what`, for `limit_s` at most."""
        self._phase = what
        done = threading.Event()
        deadline = self.clock() + limit_s

        def extend() -> None:
            while self.clock() < deadline:
                self.notifier.extend_timeout(_EXTEND_BY_S)
                if done.wait(_EXTEND_EVERY_S):
                    return

        self.notifier.status(what)
        thread = threading.Thread(target=extend, name="starting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def started(self, status: str) -> None:
        self._phase = None
        self.notifier.ready(status)

    def stopping(self, status: str) -> None:
        if self._phase != "stopping":
            self._phase = "stopping"
            self.notifier.stopping(status)

    def alive(self) -> Findings:
        late = self._late_loops()
        if any(late.values()) and not self._has_logged:
            self._has_logged = True
            log_stacks(next(f"{name} {why}" for name, why in late.items() if why))
        return late | {name: check() for name, check in list(self._alive_checks.items())}

    def ready(self) -> Findings:
        phase: Findings = {"phase": self._phase}
        return phase | self.alive() | {name: check() for name, check in list(self._ready_checks.items())}

    def _late_loops(self) -> Findings:
        now = self.clock()
        limit = f"observability.unresponsive_after_s={self.unresponsive_after_s:g}"
        ages = {loop: now - at for loop, at in list(self._beats.items())}
        return {
            f"{loop} loop": f"has not come round for {age:.0f} s ({limit})" if age > self.unresponsive_after_s else None
            for loop, age in ages.items()
        }
