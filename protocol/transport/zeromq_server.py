"""The trainer's end of the channels: two ROUTER sockets, for control and for blobs.

Guarantee: a message is sent whole or `send` returns False. Only kinds of messages that producers send are accepted, and one
process at a time serves an endpoint. With keys, a message is accepted only under the key of the identity that is in the
producer's name and in its routing id. Nothing that a peer sends raises an exception here: what cannot be used is dropped whole
and counted.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from protocol.security.authenticator import ZAP_DOMAIN, Authenticator
from protocol.security.authorized_keys import AuthorizedKeys
from protocol.security.keys import TrainerKeys, identity_of
from protocol.security.rejections import Refusals
from protocol.transport.channel import BadFrame, PeerSchemas
from protocol.transport.connection_guard import ConnectionGuard
from protocol.transport.ipc import endpoint_error, ipc_lock
from protocol.transport.zeromq_sockets import BURST, NOBLOCK, ZmqChannel, read, take
from protocol.wire.messages import Hello, Message, ProducerMessage, Reject

_PEER, _SRCFD = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.SRCFD)  # enums cost more than a send
_MAX_ROUTING_ID_BYTES = 255  # as ZMTP has it; libzmq takes longer ones, and every place that knows a peer keeps its own


class ZmqServer(ZmqChannel):
    """A `ServerChannel` bound to two endpoints. Without `keys` everybody can connect who reaches them. `EndpointInUseError`
    says that another process serves one of them, `ConfigError` that this machine cannot bind it."""

    def __init__(
        self, control_endpoint: str, blob_endpoint: str, max_message_bytes: int, keys: TrainerKeys | None = None
    ) -> None:
        super().__init__(control_endpoint, blob_endpoint, max_message_bytes)
        self.refusals = Refusals()
        self._schemas = PeerSchemas()
        self._authorized = AuthorizedKeys(keys.authorized) if keys else None
        self._authenticator: Authenticator | None = None
        with ExitStack() as closing:
            locks = closing.enter_context(ExitStack())
            closing.callback(super().close)
            if self._authorized is not None:
                self._authenticator = Authenticator(self._context, self._authorized, self.refusals)
                closing.callback(self._authenticator.stop)
                self._authenticator.start()
            opened = self._open(zmq.ROUTER, self._options(keys))
            self._guard = ConnectionGuard(
                self.sockets, self.refusals, max_message_bytes, self._authorized, self._authenticator, self.wake
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
    def _options(keys: TrainerKeys | None) -> dict[int, Any]:
        # Without keys nobody answers for the domain. libzmq then refuses ZMTP 1 and 2, whose messages do not tell which
        # connection they came over, and accepts every other peer.
        options: dict[int, Any] = {zmq.ROUTER_MANDATORY: 1, zmq.ZAP_DOMAIN: ZAP_DOMAIN}
        if keys is None:
            return options
        return options | {zmq.ZAP_ENFORCE_DOMAIN: 1, zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: keys.secret.reveal()}

    def send(self, peer: bytes, message: Message) -> bool:
        try:
            frame, socket = self._frame(message, self._schemas[peer]), self._of(message)
            socket.send(peer, _PEER)
            socket.send(frame, NOBLOCK)
        except zmq.ZMQError:
            self._schemas.forget(peer)
            return False
        return True

    def poll(self, timeout_s: float) -> list[tuple[bytes, ProducerMessage | BadFrame]]:
        self._guard.check()
        ready = self._wait(timeout_s)
        arrived: list[tuple[bytes, ProducerMessage | BadFrame]] = []
        for index, socket in enumerate(self.sockets):
            for _ in range(BURST if socket in ready else 0):
                try:
                    head = socket.recv(NOBLOCK, copy=False)
                except zmq.Again:
                    self._guard.note_drained(index)
                    break
                message = self._receive(index, head, *take(socket))
                if message is not None:
                    arrived.append((head.bytes, message))
            if socket not in ready:
                self._guard.note_drained(index)
        return arrived

    def _receive(self, index: int, head: zmq.Frame, frame: bytes, num_frames: int) -> ProducerMessage | BadFrame | None:
        """What has come under the routing id in `head`; None if it is refused."""
        peer = head.bytes
        try:
            user = str(head.get("User-Id")).encode() if self._authorized is not None else b""
            self._guard.note_delivery(index, int(head.get(_SRCFD)), user)
        except zmq.ZMQError:
            self.refusals("unreadable", "a message that does not say which connection it came over")
            return None
        if len(peer) > _MAX_ROUTING_ID_BYTES:
            self.refusals("unreadable", f"a message under a routing id of {len(peer)} bytes")
            return None
        message = read(frame, num_frames, ProducerMessage, partial(self._schemas.note, peer))
        return message if self._authorized is None or self._is_own_name(peer, message, user) else None

    def _is_own_name(self, peer: bytes, message: ProducerMessage | BadFrame, user: bytes) -> bool:
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
