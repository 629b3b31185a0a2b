"""A producer's connection to a relay: one DEALER socket.

Guarantee: a message is sent whole or `send` returns False, and only kinds of messages that a relay sends are accepted. With keys
it talks to nobody but the owner of the key that the trainer named.
"""

import secrets
from typing import Any

import zmq

from protocol.errors import ConfigError
from protocol.security.keys import SecretKey
from protocol.transport.channel import BadFrame
from protocol.transport.zeromq_sockets import NOBLOCK, ZmqChannel, curve_client, read, take
from protocol.wire.policy_messages import RelayMessage, RelayRequest

_QUEUE = 32  # messages in each direction


class RelayConnection(ZmqChannel):
    """Of the producer `name` to a relay that need not be there. `keys` are its own secret and the relay's public key."""

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
