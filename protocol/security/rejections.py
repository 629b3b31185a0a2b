"""Connections and messages that the trainer's sockets refused, by reason.

Guarantee: every reason is counted from 0 and no other reason is ever added, so any thread may read the counts. The log shows the
first refusals of a reason, and then one in ten seconds, however many there are.
"""

import logging
import threading
from collections import Counter

from protocol.throttle import Throttle

logger = logging.getLogger(__name__)

REASONS = (
    "no_key",  # the peer has no key, or does not speak CURVE
    "unknown_key",  # its key is not in the folder of authorized keys
    "wrong_server_key",  # it has the public key of another trainer
    "wrong_identity",  # it uses the name of another key
    "revoked",  # its key was taken out while it was connected
    "bad_handshake",  # it does not speak version 3 of ZMTP, or sends too much before its handshake is over
    "handshake_timeout",  # it did not finish its handshake in time
    "too_many_connections",  # there are too many unfinished handshakes, or connections
    "too_many_of_one_key",  # its key has too many of all connections
    "oversized",  # its frame is larger than max_message_bytes, or is no frame
    "multipart",  # its message does not end
    "unreadable",  # its message came over no known connection, or its routing id is too long
    "authenticator_dead",  # the authenticator has ended, so no key can be checked
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
