"""Whether the trainer is there, as a state machine without sockets.

Guarantee: one greeting is under way at a time, and an unanswered one is given up after `timeout_s`; a trainer that says
nothing for `timeout_s` counts as gone; while it is waited for, the log says so at once and every ten seconds.
"""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

REMIND_EVERY_S = 10.0
_RECONNECT_AFTER_S = 0.3


@dataclass
class Connection:
    """Belongs to the link, which notes greetings, welcomes and messages. Any thread may read it."""

    endpoint: str
    timeout_s: float
    connected: bool = False
    heard_at: float = 0.0
    hello_at: float | None = None  # of the greeting that went out over this connection
    _hello_after: float = 0.0
    _waiting_since: float = 0.0
    _reminded_at: float = 0.0

    def await_trainer(self, now: float, reason: str = "") -> None:
        """Says that the trainer is waited for, with the reason if it was there before."""
        self.connected = False
        self._waiting_since = self._reminded_at = now
        waiting = f"waiting for {'it' if reason else 'the trainer'} at {self.endpoint}"
        logger.info("%s", f"{reason}; {waiting}" if reason else waiting)

    def remind(self, now: float) -> None:
        if now - self._reminded_at >= REMIND_EVERY_S:
            self._reminded_at = now
            logger.info("waiting for the trainer at %s (%.0f s)", self.endpoint, now - self._waiting_since)

    def hello_due(self, now: float) -> bool:
        return self.hello_at is None and now >= self._hello_after

    def hello_unanswered(self, now: float) -> bool:
        return self.hello_at is not None and now - self.hello_at >= self.timeout_s

    def start_over(self, now: float) -> None:
        """The next greeting goes out over a new connection, a moment later."""
        self.hello_at = None
        self._hello_after = now + _RECONNECT_AFTER_S

    def is_silent(self, now: float) -> bool:
        return self.connected and now - self.heard_at > self.timeout_s
