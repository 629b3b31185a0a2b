"""The ends of channels to which producers connect: the trainer's, of two ROUTER sockets for control and for blobs, and a relay's,
of one for blobs.

Guarantee: a message is sent whole or `send` returns False. Only kinds of messages that producers send there are accepted. One
process at a time serves an endpoint: ZeroMQ would let a second process take an ipc path from a live one, so a lock file beside
the path is locked first. With keys, a message is accepted only under the key of the identity that is in the producer's name and
in its routing id. Nothing that a peer sends raises an exception here: an unusable message is dropped whole and counted.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

import zmq

from protocol.channel.authenticator import ZAP_DOMAIN, Authenticator, AuthorizedKeys, KeyRing, Refusals
from protocol.channel.channel import BURST, NOBLOCK, BadFrame, ZmqChannel, endpoint_error, ipc_lock, read, take
from protocol.channel.connection_guard import ConnectionGuard
from protocol.channel.keys import SecretKey, TrainerKeys, identity_of
from protocol.wire.messages import Hello, Message, ProducerMessage, Reject, RelayRequest

_PEER, _SRCFD = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.SRCFD)  # enums cost more than a send
_RELAY_QUEUE = 32  # messages for one peer, and from it; it asks for few at a time
_MAX_RELAY_REQUEST_BYTES = 4096
_BLOB_BURST = 8  # a chunk of an adapter costs as much as a dozen groups
_BACKLOG = 4096  # of all producers when the trainer comes back; the kernel allows net.core.somaxconn
_MAX_ROUTING_ID_BYTES = 255  # as ZMTP has it; libzmq takes longer ones, and every place that knows a peer keeps its own


class ServerKeys(NamedTuple):
    """The server's own key, and who may connect."""

    secret: SecretKey
    authorized: KeyRing


class ZmqRouter(ZmqChannel):
    """A channel bound to `endpoints`, which takes messages of `kinds`. Without `keys` everybody can connect who reaches them.
    `EndpointInUseError` says that another process serves one of them, `ConfigError` that this machine cannot bind it."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        max_message_bytes: int,
        keys: ServerKeys | None,
        kinds: Any,
        max_received_bytes: int | None = None,
        options: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(endpoints, max_message_bytes)
        max_received_bytes = max_received_bytes or max_message_bytes
        self.refusals = Refusals()
        self._kinds = kinds
        self._authorized = keys.authorized if keys else None
        self._authenticator: Authenticator | None = None
        with ExitStack() as closing:
            locks = closing.enter_context(ExitStack())
            closing.callback(super().close)
            if self._authorized is not None:
                self._authenticator = Authenticator(self._context, self._authorized, self.refusals)
                closing.callback(self._authenticator.stop)
                self._authenticator.start()
            opened = self._open(zmq.ROUTER, {zmq.MAXMSGSIZE: max_received_bytes} | self._options(keys) | dict(options))
            self._guard = ConnectionGuard(
                self.sockets, self.refusals, max_received_bytes, self._authorized, self._authenticator, self.wake
            )
            closing.callback(self._guard.stop)
            self._guard.start()
            for socket, endpoint in opened:
                locks.enter_context(ipc_lock(endpoint))
                try:
                    socket.bind(endpoint)
                except zmq.ZMQError as error:
                    raise endpoint_error(OSError(error.errno, error.strerror), endpoint) from error
            self._closing = closing.pop_all()

    @staticmethod
    def _options(keys: ServerKeys | None) -> dict[int, Any]:
        # Without keys nobody answers for the domain. libzmq then refuses ZMTP 1 and 2, whose messages do not tell which
        # connection they came over, and accepts every other peer.
        options: dict[int, Any] = {zmq.ROUTER_MANDATORY: 1, zmq.ZAP_DOMAIN: ZAP_DOMAIN, zmq.BACKLOG: _BACKLOG}
        if keys is None:
            return options
        return options | {zmq.ZAP_ENFORCE_DOMAIN: 1, zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: keys.secret.reveal()}

    def send(self, peer: bytes, message: Message) -> bool:
        try:
            frame, socket = self._frame(message), self._of(message)
            socket.send(peer, _PEER)
            socket.send(frame, NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def poll(self, timeout_s: float) -> list[tuple[bytes, Any]]:
        self._guard.check()
        ready = self._wait(timeout_s)
        arrived: list[tuple[bytes, Any]] = []
        for index, socket in enumerate(self.sockets):
            for _ in range((BURST, _BLOB_BURST)[index] if socket in ready else 0):
                try:
                    head = socket.recv(NOBLOCK, copy=False)
                except zmq.Again:
                    self._guard.deliveries.note_drained(index)
                    break
                message = self._receive(index, head, *take(socket))
                if message is not None:
                    arrived.append((head.bytes, message))
            if socket not in ready:
                self._guard.deliveries.note_drained(index)
        return arrived

    def disconnected(self) -> list[bytes]:
        return [peer for index, peer in self._guard.deliveries.take_ended() if index == 0]

    def _receive(self, index: int, head: zmq.Frame, frame: bytes, num_frames: int) -> Any:
        """Return the message that came under the routing id in `head`; None if it is refused."""
        peer = head.bytes
        try:
            user = str(head.get("User-Id")).encode() if self._authorized is not None else b""
            self._guard.deliveries.note((index, int(head.get(_SRCFD))), user, peer)
        except zmq.ZMQError:
            self.refusals("unreadable", "a message that does not say which connection it came over")
            return None
        if len(peer) > _MAX_ROUTING_ID_BYTES:
            self.refusals("unreadable", f"a message under a routing id of {len(peer)} bytes")
            return None
        message = read(frame, num_frames, self._kinds)
        return message if self._authorized is None or self._is_own_name(peer, message, user) else None

    def _is_own_name(self, peer: bytes, message: Any, user: bytes) -> bool:
        assert self._authorized is not None
        identity = self._authorized.identity(user)
        if identity is None:
            self.refusals("revoked", "a message under a key that is not authorized any more")
            return False
        claimed = peer.decode(errors="replace").partition("/")[0]
        names = {claimed, message.producer} if isinstance(message, Hello) else {claimed}
        if {identity_of(name) for name in names} == {identity}:
            return True
        stolen = " and ".join(repr(name) for name in sorted(names))
        self.refusals("wrong_identity", f"a message of {identity}, which calls itself {stolen}")
        if isinstance(message, Hello):
            problem = f"this key is that of {identity}, and not of {stolen}: name it in transport.identity"
            self.send(peer, Reject([problem]))
        return False

    def close(self) -> None:
        self._closing.close()


class ZmqServer(ZmqRouter):
    """A `ServerChannel`: the trainer's."""

    def __init__(
        self, control_endpoint: str, blob_endpoint: str, max_message_bytes: int, keys: TrainerKeys | None = None
    ) -> None:
        self._ring = AuthorizedKeys(keys.authorized) if keys else None
        server_keys = ServerKeys(keys.secret, self._ring) if keys and self._ring else None
        super().__init__((control_endpoint, blob_endpoint), max_message_bytes, server_keys, ProducerMessage)

    def authorized(self) -> dict[str, bytes] | None:
        return None if self._ring is None else self._ring.by_identity()


class ZmqRelay(ZmqRouter):
    """A producer's, for other producers, who ask for policies. A peer that does not read what it asked for is sent no more."""

    def __init__(self, endpoint: str, max_message_bytes: int, keys: ServerKeys | None) -> None:
        options: dict[int, Any] = {zmq.SNDHWM: _RELAY_QUEUE, zmq.RCVHWM: _RELAY_QUEUE}
        super().__init__((endpoint,), max_message_bytes, keys, RelayRequest, _MAX_RELAY_REQUEST_BYTES, options)

    def poll(self, timeout_s: float) -> list[tuple[bytes, RelayRequest | BadFrame]]:
        return super().poll(timeout_s)
