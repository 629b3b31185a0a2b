"""Explains why a producer cannot connect to its trainer.

Guarantee: when a handshake fails, the log says what to do, at once and then at most every ten seconds, and the producer tries
again. ZeroMQ alone would give up after some failures and never notice a key that is authorized later.
"""

import logging
import struct
import time
from dataclasses import dataclass, field

import zmq

from protocol.security.keys import ProducerKeys, fingerprint
from protocol.throttle import Throttle

logger = logging.getLogger(__name__)

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_FATAL = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)  # after which ZeroMQ does not try again
_RETRY_S = 1.0
_UNEXPLAINED = 3  # failures in a row; a trainer that is being stopped may cause one


@dataclass
class HandshakeWatch:
    endpoint: str
    keys: ProducerKeys | None
    _socket: "zmq.Socket[bytes] | None" = field(default=None, init=False)
    _monitor: "zmq.Socket[bytes] | None" = field(default=None, init=False)
    _failures: int = field(default=0, init=False)
    _retry_at: float | None = field(default=None, init=False)
    _warn: Throttle = field(default_factory=lambda: Throttle(logger, num_at_once=1, then_every_s=10.0), init=False)

    def begin(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket, self._monitor = socket, socket.get_monitor_socket(_EVENTS)
        self._retry_at = None

    def end(self) -> None:
        """Call it before the socket is closed. May be called twice."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket = self._monitor = None

    def must_reconnect(self) -> bool:
        now = time.monotonic()
        while self._monitor is not None and self._monitor.poll(0):
            event, value = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            self._note(event, value, now)
        return self._retry_at is not None and now >= self._retry_at

    def _note(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
            return
        self._failures += 1
        if event in _FATAL:
            self._retry_at = now + _RETRY_S
        elif self._failures < _UNEXPLAINED:
            return
        self._warn("handshake", f"the trainer at {self.endpoint} {self._explain(event, value)}")

    def _explain(self, event: int, value: int) -> str:
        keys = self.keys
        if keys is None:
            return "ends the handshake: it wants keys. Set transport.keys, as the trainer does (docs/security.md)"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == 400:
            return (
                f"does not know the key of {keys.identity} ({fingerprint(keys.secret.public())}): give its host "
                f"{keys.identity}.public, and there run `rl-keys authorize {keys.identity}`"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return "has no keys, and this producer has: set transport.keys for both or for neither"
        return (
            f"ends the handshake: it has another key than {keys.trainer_file} ({fingerprint(keys.trainer)}), or none. Copy "
            "trainer.public from its host; or its log says why it refuses"
        )
