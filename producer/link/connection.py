"""Whether the trainer is there, as a state machine without sockets.

Guarantee: one greeting is under way at a time, and an unanswered one is given up after `timeout_s`; a trainer that says
nothing for `timeout_s` counts as gone; while it is waited for, the log says so at once and every ten seconds.
"""

import logging

logger = logging.getLogger(__name__)

REMIND_EVERY_S = 10.0
_RECONNECT_AFTER_S = 0.3


class Connection:
    """Belongs to the link's thread. `connected` may be read by any."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self.connected = False
        self._heard_at = 0.0
        self._hello_at: float | None = None
        self._hello_after = 0.0
        self._waiting_since = self._reminded_at = 0.0

    def await_trainer(self, now: float, reason: str = "") -> None:
        """Says that the trainer is waited for, with the reason if it was there before."""
        self.connected = False
        self._waiting_since = self._reminded_at = now
        waiting = f"waiting for {'it' if reason else 'the trainer'} at {self._endpoint}"
        logger.info("%s", f"{reason}; {waiting}" if reason else waiting)

    def remind(self, now: float) -> None:
        if now - self._reminded_at >= REMIND_EVERY_S:
            self._reminded_at = now
            logger.info("waiting for the trainer at %s (%.0f s)", self._endpoint, now - self._waiting_since)

    def hello_due(self, now: float) -> bool:
        return self._hello_at is None and now >= self._hello_after

    def hello_unanswered(self, now: float) -> bool:
        return self._hello_at is not None and now - self._hello_at >= self._timeout_s

    def note_hello(self, now: float) -> None:
        self._hello_at = now

    @property
    def greeted(self) -> bool:
        """Whether a greeting went out over this connection."""
        return self._hello_at is not None

    def greet_again(self) -> None:
        """The next greeting goes out over the same connection."""
        self._hello_at = None

    def start_over(self, now: float) -> None:
        """The next greeting goes out over a new connection, a moment later."""
        self._hello_at = None
        self._hello_after = now + _RECONNECT_AFTER_S

    def note_welcome(self) -> None:
        self.connected = True

    def note_message(self, now: float) -> None:
        self._heard_at = now

    def heard_ago_s(self, now: float) -> float:
        return now - self._heard_at

    def is_silent(self, now: float) -> bool:
        return self.connected and self.heard_ago_s(now) > self._timeout_s
