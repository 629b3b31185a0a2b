"""Connections and messages that the trainer's sockets refused, by reason.

Guarantee: every reason is there from the start with 0 and no other is ever added, so that the counts may be read from any
thread; the log shows the first refusals of a kind and then one a while, however many there are.
"""

import logging
import threading
from collections import Counter

from protocol.throttle import Throttle

logger = logging.getLogger(__name__)

REASONS = (
    "no_key",  # speaks without a key, or no CURVE at all
    "unknown_key",  # a key that is not in the folder of authorized ones
    "wrong_server_key",  # takes this trainer for another one
    "wrong_identity",  # claims the name of another key
    "revoked",  # its key was taken out while it was connected
    "bad_handshake",  # no ZMTP of version 3, or too many bytes of it
    "handshake_timeout",  # connected and did not finish its handshake
    "too_many_connections",  # one of more unfinished handshakes, or of more connections, than there may be
    "oversized",  # a frame above max_message_bytes, or one that is none
    "multipart",  # a message without end
    "unreadable",  # a message of no known connection, or under a routing id that is too long
    "authenticator_dead",  # nobody is left to ask about its key
)


class Refusals:
    """Call it with a reason and a sentence, from any thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._lock = threading.Lock()
        self._warn = Throttle(logger, num_at_once=3, then_every_s=10.0)

    def __call__(self, reason: str, text: str) -> None:
        assert reason in REASONS
        with self._lock:
            self.counts[reason] += 1
            count = self.counts[reason]
        self._warn(reason, f"refused {text} ({reason}, {count} so far)")
