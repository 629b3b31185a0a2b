"""Whether a daemon is alive and whether it can work, with reasons, for `/healthz`, `/readyz` and systemd's watchdog.

Guarantee: `alive` fails when a loop that has begun to beat has not beaten for `unresponsive_after_s`, or when a check fails.
`ready` fails for the same reasons, while the daemon starts or stops, and when one of its own checks fails. Only the beats of
working loops reach the watchdog. Any thread may use it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protocol.service.systemd import Notifier

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
        """Adds a check to both answers."""
        self._alive_checks[name] = check

    def check_ready(self, name: str, check: Check) -> None:
        self._ready_checks[name] = check

    @contextlib.contextmanager
    def starting(self, what: str, limit_s: float) -> Iterator[None]:
        """While the daemon does `what`, systemd's timeout is extended, for `limit_s` at most."""
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
        return self._late_loops() | {name: check() for name, check in list(self._alive_checks.items())}

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
