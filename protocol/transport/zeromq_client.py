"""A producer's end of the channels: two DEALER sockets, for control and for blobs.

Guarantee: a message is sent whole or `send` returns False. No message waits in a queue for a trainer that is not there
(`IMMEDIATE`), and only kinds of messages that a trainer sends are accepted.
"""

import secrets
from typing import Any

import zmq

from protocol.errors import ConfigError
from protocol.security.keys import ProducerKeys
from protocol.transport.channel import BadFrame, TrainerSchema
from protocol.transport.handshake_watch import HandshakeWatch
from protocol.transport.zeromq_sockets import BURST, NOBLOCK, ZmqChannel, read, take
from protocol.wire.messages import Message, TrainerMessage


class ZmqClient(ZmqChannel):
    """A `ClientChannel` connected to the two endpoints of a trainer, which need not be there yet, or `ConfigError` for an
    endpoint that nobody can connect to. Without `keys` it connects to a trainer without keys."""

    def __init__(
        self,
        name: str,
        control_endpoint: str,
        blob_endpoint: str,
        max_message_bytes: int,
        keys: ProducerKeys | None = None,
    ) -> None:
        super().__init__(control_endpoint, blob_endpoint, max_message_bytes)
        self._name = name
        self._keys = keys
        self._watch = HandshakeWatch(control_endpoint, keys)
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
        self._schema = TrainerSchema()
        # Nobody else can guess it and so keep this producer out: a ROUTER ignores who comes under an id in use.
        routing_id = f"{self._name}/{self._resets}/{secrets.token_hex(8)}".encode()
        options: dict[int, Any] = {
            zmq.IMMEDIATE: 1,
            zmq.ROUTING_ID: routing_id,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
        }
        if self._keys is not None:
            options |= {
                zmq.CURVE_SERVERKEY: self._keys.trainer,
                zmq.CURVE_PUBLICKEY: self._keys.secret.public(),
                zmq.CURVE_SECRETKEY: self._keys.secret.reveal(),
            }
        opened = self._open(zmq.DEALER, options)
        self._watch.begin(opened[0][0])
        for socket, endpoint in opened:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                fix = "; give producers the trainer's address with --set transport.endpoint" if "*" in endpoint else ""
                raise ConfigError(f"transport.endpoint: cannot connect to {endpoint}: {error}{fix}") from error

    @property
    def schema_version(self) -> int:
        return self._schema.version

    def send(self, message: Message) -> bool:
        try:
            self._of(message).send(self._frame(message, self._schema.version), NOBLOCK)
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
                    arrived.append(read(*take(socket), TrainerMessage, self._schema.note))
                except zmq.Again:
                    break
        return arrived

    def close(self) -> None:
        self._watch.end()
        super().close()
