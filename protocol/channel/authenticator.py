"""The authentication of producers: the folder of authorized keys, the thread that answers libzmq, and the counts of refusals.

Guarantee: a key may connect only while it is in the folder, and its messages carry it as `User-Id`. When the thread has ended, no
key may connect, because the sockets name a domain and enforce it. A file that comes or goes takes effect at the next `refresh`,
and a file that is changed in place at most half a second later. An unreadable folder authorizes no producer; the log names a
file that holds no key or the key of another name. Each reason for a refusal is counted from 0, and no other reason is ever added.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils import z85

from protocol.channel.keys import TRAINER, fingerprint, read_public
from protocol.errors import ConfigError
from protocol.runtime.logs import Throttle

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


_LOOK_EVERY_S = 0.5  # at every file


class KeyRing(Protocol):
    """The keys that may connect. Any thread may use it.

    Attributes:
        revision: grows with every change.
    """

    revision: int

    def identity(self, key: bytes) -> str | None:
        """The owner of a public key that may connect."""

    def refresh(self) -> None:
        """Look for changes."""


@dataclass
class GrantedKeys:
    """A `KeyRing` that another object fills: by public key, its owner. It is empty at first."""

    names: Mapping[bytes, str] = field(default_factory=dict)
    revision: int = 0

    def grant(self, names: Mapping[bytes, str]) -> None:
        self.names = names
        self.revision += 1

    def identity(self, key: bytes) -> str | None:
        return self.names.get(key)

    def refresh(self) -> None: ...


_Signature = tuple[tuple[str, int, int, int], ...]


class AuthorizedKeys:
    """The `KeyRing` of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.revision = 0  # grows with every change
        self._names: dict[bytes, str] = {}
        self._signature: _Signature | None = None
        self._folder_changed_at: int | None = None  # its own time, nanoseconds
        self._look_at = 0.0
        self._is_readable = True
        self._lock = threading.Lock()
        self.refresh()
        if not self._names:
            logger.warning(
                "no producer is authorized, so none can connect: authorize one with `slipstream keys authorize`"
            )

    def identity(self, key: bytes) -> str | None:
        return self._names.get(key)

    def by_identity(self) -> dict[str, bytes]:
        return {name: key for key, name in self._names.items()}

    def refresh(self) -> None:
        with self._lock:
            changed_at = self._changed_at()
            if changed_at == self._folder_changed_at and time.monotonic() < self._look_at:
                return
            self._folder_changed_at, self._look_at = changed_at, time.monotonic() + _LOOK_EVERY_S
            signature = self._look()
            if signature == self._signature:
                return
            before, self._names = self._names, self._load(name for name, *_ in signature)
            if self._signature is not None:
                self._log_changes(before)
            self._signature = signature
            self.revision += 1

    def _changed_at(self) -> int | None:
        try:
            return self._folder.stat().st_mtime_ns
        except OSError:
            return None

    def _look(self) -> _Signature:
        found = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(".public"):
                        status = entry.stat()
                        found.append((entry.name, status.st_ino, status.st_mtime_ns, status.st_size))
            self._is_readable = True
        except OSError as error:
            if self._is_readable:
                logger.error("%s cannot be read, so no producer is authorized: %s", self._folder, error.strerror)
            self._is_readable = False
            return ()
        return tuple(sorted(found))

    def _load(self, files: Iterable[str]) -> dict[bytes, str]:
        names: dict[bytes, str] = {}
        for file in files:
            try:
                name, key = read_public(self._folder / file)
            except ConfigError as error:
                logger.error("not authorized: %s", error)
                continue
            if file != f"{name}.public" or name == TRAINER or key in names:
                logger.error("not authorized: %s holds the key of %s", self._folder / file, names.get(key, name))
                continue
            names[key] = name
        return names

    def _log_changes(self, before: dict[bytes, str]) -> None:
        for key in self._names.keys() - before.keys():
            logger.info("authorized: %s", self._names[key])
        for key in before.keys() - self._names.keys():
            logger.warning("no longer authorized: %s", before[key])


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
        """End the thread. May be called twice."""
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
