"""The producers that may connect: those whose public keys are in a folder at this moment.

Guarantee: a file that comes or goes takes effect at the next `refresh`, one that is changed in place half a second later at
most. In between a `refresh` costs the same however many keys there are. A folder that cannot be read authorizes nobody. A file in
it that holds no key, or the key of another name, authorizes nobody, and the log names it.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from protocol.errors import ConfigError
from protocol.security.keys import TRAINER, read_public

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5  # at every file


class KeyRing(Protocol):
    """Who may connect. May be used from any thread.

    Attributes:
        revision: grows with every change.
    """

    revision: int

    def identity(self, key: bytes) -> str | None:
        """The owner of a public key that may connect."""

    def refresh(self) -> None:
        """Looks for changes."""


@dataclass
class GrantedKeys:
    """A `KeyRing` that somebody else keeps: by public key, its owner. Nobody may connect at first."""

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
            logger.warning("no producer is authorized: nobody can connect until `rl-keys authorize` lets one in")

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
