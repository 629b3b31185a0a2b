"""A producer's end of the channels: two DEALER sockets to its trainer, for control and for blobs, or one to a relay.

Guarantee: a message is sent whole or `send` returns False, and only kinds of messages that the other end sends are accepted. No
message waits in a queue for an absent trainer (`IMMEDIATE`). With keys a producer talks only to the owner of the key that it was
given. When a handshake fails, the log gives the fix, at once and then at most every ten seconds, and the producer tries again;
ZeroMQ alone would stop after some failures and never notice a key that is authorized later.
"""

import logging
import secrets
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from protocol.channel.channel import BURST, NOBLOCK, BadFrame, ZmqChannel, curve_client, read, take
from protocol.channel.keys import ProducerKeys, SecretKey, fingerprint
from protocol.errors import ConfigError
from protocol.runtime.logs import Throttle
from protocol.wire.messages import Message, RelayMessage, RelayRequest, TrainerMessage

logger = logging.getLogger(__name__)

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_FATAL = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)  # after which ZeroMQ does not try again
_RETRY_S = 1.0
_LEAST_RECONNECT_MS, _RECONNECT_JITTER_MS = 500, 1000  # so that a fleet, lost at one moment, comes back one by one
_UNEXPLAINED = 3  # failures in a row; a trainer that is being stopped may cause one


class ZmqClient(ZmqChannel):
    """A `ClientChannel` connected to the two endpoints of a trainer, which need not be there yet, or `ConfigError` for an
    endpoint to which no socket can connect. Without `keys` it connects to a trainer without keys."""

    def __init__(
        self,
        name: str,
        control_endpoint: str,
        blob_endpoint: str,
        max_message_bytes: int,
        keys: ProducerKeys | None = None,
    ) -> None:
        super().__init__((control_endpoint, blob_endpoint), max_message_bytes)
        self._name = name
        self._keys = keys
        self._watch = _HandshakeWatch(control_endpoint, keys)
        self._resets = 0
        try:
            self.reset()
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        self._watch.end()
        self._shut()
        self._resets += 1
        # Nobody else can guess it and so keep this producer out: a ROUTER ignores who comes under an id in use.
        routing_id = f"{self._name}/{self._resets}/{secrets.token_hex(8)}".encode()
        options: dict[int, Any] = {
            zmq.IMMEDIATE: 1,
            zmq.ROUTING_ID: routing_id,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: _LEAST_RECONNECT_MS + secrets.randbelow(_RECONNECT_JITTER_MS),
        }
        if self._keys is not None:
            options |= curve_client(self._keys.secret, self._keys.trainer)
        opened = self._open(zmq.DEALER, options)
        self._watch.begin(opened[0][0])
        for socket, endpoint in opened:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                fix = "; give producers the trainer's address with --set transport.endpoint" if "*" in endpoint else ""
                raise ConfigError(f"transport.endpoint: cannot connect to {endpoint}: {error}{fix}") from error

    @property
    def endpoint(self) -> str:
        return self._endpoints[0]

    @property
    def problem(self) -> str:
        """Return why the last handshake failed, as the predicate of a sentence about the trainer; "" if none did."""
        return self._watch.problem

    def send(self, message: Message) -> bool:
        try:
            self._of(message).send(self._frame(message), NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float) -> list[TrainerMessage | BadFrame]:
        if self._watch.must_reconnect():
            self.reset()
        arrived: list[TrainerMessage | BadFrame] = []
        for socket in self._wait(timeout_s):
            for _ in range(BURST):
                try:
                    arrived.append(read(*take(socket), TrainerMessage))
                except zmq.Again:
                    break
        return arrived

    def close(self) -> None:
        self._watch.end()
        super().close()


@dataclass
class _HandshakeWatch:
    """Explains why the producer cannot connect to its trainer."""

    endpoint: str
    keys: ProducerKeys | None
    problem: str = ""
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
            self._failures, self.problem = 0, ""
            return
        self._failures += 1
        if event in _FATAL:
            self._retry_at = now + _RETRY_S
        elif self._failures < _UNEXPLAINED:
            return
        self.problem = self._explain(event, value)
        self._warn("handshake", f"the trainer at {self.endpoint} {self.problem}")

    def _explain(self, event: int, value: int) -> str:
        keys = self.keys
        if keys is None:
            return "ends the handshake: it wants keys. Set transport.keys, as the trainer does, or give --keys (docs/security.md)"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == 400:
            return (
                f"does not know the key of {keys.identity} ({fingerprint(keys.secret.public())}): give its host "
                f"{keys.identity}.public, and there run `slipstream keys authorize {keys.identity}`"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return "has no keys, and this producer has: set transport.keys for both or for neither"
        return (
            f"ends the handshake: it has another key than {keys.trainer_file} ({fingerprint(keys.trainer)}), or none. Copy "
            "trainer.public from its host; or its log says why it refuses"
        )


_QUEUE = 32  # messages in each direction


class RelayConnection(ZmqChannel):
    """The connection of the producer `name` to a relay, which may be absent. `keys` are its own secret and the relay's public
    key."""

    def __init__(
        self, name: str, endpoint: str, max_message_bytes: int, keys: tuple[SecretKey, bytes] | None = None
    ) -> None:
        super().__init__((endpoint,), max_message_bytes)
        options: dict[int, Any] = {
            zmq.ROUTING_ID: f"{name}/1/{secrets.token_hex(8)}".encode(),
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.SNDHWM: _QUEUE,
            zmq.RCVHWM: _QUEUE,
        }
        try:
            [(socket, _)] = self._open(zmq.DEALER, options | (curve_client(*keys) if keys else {}))
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"the relay at {endpoint} cannot be connected to: {error}") from error

    def send(self, message: RelayRequest) -> bool:
        try:
            self.sockets[0].send(self._frame(message), NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float) -> list[RelayMessage | BadFrame]:
        arrived: list[RelayMessage | BadFrame] = []
        for socket in self._wait(timeout_s):
            for _ in range(_QUEUE):
                try:
                    arrived.append(read(*take(socket), RelayMessage))
                except zmq.Again:
                    break
        return arrived
