"""The policies that the producers of one host share, as files in memory, by digest.

Guarantee: of the processes of one host that want a policy one at a time downloads it. When that process dies another one may, at
once, because the kernel drops its lock. A file appears whole, after its sha256 was seen to match; each reader verifies it
again. There are at most `_KEPT` policies, and a few bytes for each that is being downloaded. Where the memory is full, or where
there is none, each process downloads for itself.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from protocol.runtime import scratch as shared_memory
from protocol.runtime.scratch import SharedMemory, UnusableFileError, common_folder, read_offered

logger = logging.getLogger(__name__)

_KEPT = 4  # the newest, its anchor, the one before, and one that is evaluated
_STATE = struct.Struct("<qq")  # a `DownloadState`
_UNSTORABLE = -1


class DownloadState(NamedTuple):
    """`beat` changes as long as its process works on it."""

    num_bytes: int
    beat: int


@dataclass
class HostCache:
    """May be used from any thread. Digests are 64 hexadecimal digits."""

    folder: Path | None  # None: nothing is shared

    def has_room(self, num_bytes: int) -> bool:
        with contextlib.suppress(OSError):
            return SharedMemory(self.folder).has_room(num_bytes)
        return False

    def has(self, digest: str) -> bool:
        return self.folder is not None and (self.folder / digest).is_file()

    def read(self, digest: str, num_bytes: int) -> bytes | None:
        """The content that was stored, not verified; None if there is none of this size."""
        if self.folder is None:
            return None
        try:
            return read_offered(str(self.folder / digest), num_bytes, self.folder.parent)
        except UnusableFileError:
            return None

    def chunk(self, digest: str, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on; none if the file is gone or ends before."""
        if self.folder is None:
            return b""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.folder / digest, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return os.pread(descriptor, length, offset)
            finally:
                os.close(descriptor)
        return b""

    def drop(self, digest: str) -> None:
        """Remove a file whose sha256 is not its name."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / digest).unlink()

    def keep(self, digest: str) -> None:
        """Count a file among the newest, because newer policies build on it."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.utime(self.folder / digest)

    def progress(self, digest: str) -> DownloadState | None:
        """Return how far the download is; None if the process that downloads it has no room to share it."""
        if self.folder is not None:
            with contextlib.suppress(OSError, struct.error):
                state = DownloadState(*_STATE.unpack((self.folder / f"{digest}.lock").read_bytes()))
                return None if state.num_bytes == _UNSTORABLE else state
        return DownloadState(0, 0)

    def claim(self, digest: str) -> "Claim | None":
        """Return the right to download it for this host; None if another process has it."""
        if self.folder is None:
            return Claim(self, digest, None)
        path = self.folder / f"{digest}.lock"
        try:
            lock = _locked(path)
        except OSError as error:
            logger.warning("policies are not shared with other producers of this host: %s", error)
            return Claim(self, digest, None)
        if lock is None:
            return None
        claim = Claim(self, digest, lock)
        claim.note(0)
        return claim

    def forget_old(self) -> None:
        """Remove all but the newest, and what processes that were killed left of those."""
        assert self.folder is not None
        names = os.listdir(self.folder)
        stored: list[tuple[int, str]] = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process removes old ones, too
                if len(name) == 64:
                    stored.append(((self.folder / name).stat().st_mtime_ns, name))
        kept = {name for _, name in sorted(stored)[-_KEPT:]}
        for digest in {name.removeprefix(".")[:64] for name in names} - kept:
            path = self.folder / f"{digest}.lock"
            lock = _locked(path)
            if lock is not None:  # no process downloads it
                try:
                    for left in (digest, f".{digest}.partial", path.name):
                        (self.folder / left).unlink(missing_ok=True)
                finally:
                    os.close(lock)


@dataclass
class Claim:
    """The right to download one policy for all processes of this host. It ends with `release`, which may be called twice, or with
    the process."""

    cache: HostCache
    digest: str
    _lock: int | None  # None: what is downloaded is not shared
    _beat: int = 0
    _arriving: Path | None = None  # the file of `room`, until it is shared

    def note(self, num_bytes: int) -> None:
        """Tell those who wait how far the download is, and that it goes on."""
        if self._lock is not None:
            self._beat += 1
            with contextlib.suppress(OSError):
                os.pwrite(self._lock, _STATE.pack(num_bytes, self._beat), 0)

    def room(self, num_bytes: int) -> memoryview:
        """Memory for the bytes: that of a file of the cache where they are shared, else of this process."""
        if self._lock is not None and self.cache.folder is not None and num_bytes:
            path = self.cache.folder / f".{self.digest}.partial"
            try:
                room = _mapped(path, num_bytes)
            except OSError as error:
                self._stay_alone(error)
            else:
                self._arriving = path
                return room
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # takes memory as the bytes come
        return memoryview(mmap.mmap(-1, num_bytes, flags=flags) if num_bytes else bytearray())

    def share(self) -> None:
        """Give the bytes in `room` to the others. Only after they were verified."""
        if self._arriving is None:
            return
        assert self.cache.folder is not None
        try:
            self._arriving.rename(self.cache.folder / self.digest)
            self._arriving = None
            self.cache.forget_old()
        except OSError as error:
            self._stay_alone(error)

    def release(self) -> None:
        if self._arriving is not None:
            self._arriving.unlink(missing_ok=True)
            self._arriving = None
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child process may have inherited the descriptor
            os.close(self._lock)
            self._lock = None

    def _stay_alone(self, error: OSError) -> None:
        logger.warning("policy %s is not shared with other producers of this host: %s", self.digest[:12], error)
        self.note(_UNSTORABLE)


def _mapped(path: Path, num_bytes: int) -> memoryview:
    """The memory of a new file. All of it is reserved, so writing to it cannot fail."""
    path.unlink(missing_ok=True)  # left by a process that was killed
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        return memoryview(mmap.mmap(file, num_bytes))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


@contextlib.contextmanager
def host_cache(run: str) -> Iterator[HostCache]:
    """The cache of this host for `run`, which is what its producers have in common: the trainer's endpoint."""
    name = f"policies-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        if os.access(shared_memory.ROOT, os.W_OK):
            try:
                folder = stack.enter_context(common_folder(name, shared_memory.ROOT))
            except OSError as error:
                logger.warning("policies are not shared with other producers of this host: %s", error)
        yield HostCache(folder)


def _locked(path: Path) -> int | None:
    """A descriptor of the file at `path` that holds its lock; None if another process does."""
    while True:
        with contextlib.ExitStack() as stack:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(lock)):  # else it was removed meanwhile
                    stack.pop_all()
                    return lock
