"""Answers libzmq's question whether a CURVE key may connect (ZAP, RFC 27), on a thread of its own.

Guarantee: a key may connect only while it is in the folder of authorized keys, and its messages carry it as `User-Id`.
When this thread has ended, no key may connect, because the sockets name a domain and enforce it.
"""

import logging
import os
import threading

import zmq
from zmq.utils import z85

from protocol.security.authorized_keys import KeyRing
from protocol.security.keys import fingerprint
from protocol.security.rejections import Refusals

logger = logging.getLogger(__name__)

ZAP_DOMAIN = b"slipstream"
_VERSION = b"1.0"


class Authenticator(threading.Thread):
    """Answers for all sockets of one context. Their owner makes it before they are bound."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", authorized: KeyRing, refusals: Refusals) -> None:
        super().__init__(name="authenticator", daemon=True)
        self._authorized = authorized
        self._refusals = refusals
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")

    def stop(self) -> None:
        """Ends the thread. May be called twice."""
        if self._stop_fd >= 0:
            os.eventfd_write(self._stop_fd, 1)
            if self.ident is not None:
                self.join()
            os.close(self._stop_fd)
            self._stop_fd = -1
        self._socket.close()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        try:
            while self._stop_fd not in dict(poller.poll()):
                request = self._socket.recv_multipart()
                try:
                    answer = self._answer(request)
                except Exception as error:  # this one peer may not connect
                    self._refusals("unknown_key", f"a connection whose key cannot be looked up: {error!r}")
                    answer = [_VERSION, request[1], b"500", b"not looked up", b"", b""]
                self._socket.send_multipart(answer)
        except Exception:
            logger.exception("the authenticator failed")

    def _answer(self, request: list[bytes]) -> list[bytes]:
        _version, request_id, domain, address, _identity, mechanism, *credentials = request
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and domain == ZAP_DOMAIN else b""
        if key:
            self._authorized.refresh()
            if self._authorized.identity(key) is not None:
                return [_VERSION, request_id, b"200", b"OK", key, b""]
        who = f"key {fingerprint(key)}" if key else f"mechanism {mechanism!r}"
        self._refusals("unknown_key", f"a connection from {address.decode(errors='replace')}: {who} is not authorized")
        return [_VERSION, request_id, b"400", b"not authorized", b"", b""]
