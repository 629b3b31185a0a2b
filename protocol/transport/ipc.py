"""Endpoints that are files: ipc paths.

Guarantee: one process at a time serves a path. ZeroMQ would let a second process take a path over from a live one, so a lock file
beside the path is locked first. A socket that a dead process left is removed; a file that is no socket is refused and kept.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import ConfigError, SlipstreamError, cannot_listen

_PATH_LIMIT = 107  # bytes, sizeof(sockaddr_un.sun_path) - 1


def _ipc_path(endpoint: str) -> Path | None:
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


@contextlib.contextmanager
def ipc_lock(endpoint: str) -> Iterator[None]:
    """Holds the lock beside an ipc endpoint. Other transports need none."""
    path = _ipc_path(endpoint)
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(f"{path}.lock", "ab", opener=_private)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"transport.endpoint: cannot create {error.filename or path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise endpoint_error(error, endpoint) from error
        _remove_stale_socket(path)
        yield


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove_stale_socket(path: Path) -> None:
    """Removes the socket of a dead process. ZeroMQ would remove whatever is at the path, so another file is refused here."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"transport.endpoint: {path} exists and is not a socket; name another path")
    path.unlink()


def check_path_length(endpoint: str) -> None:
    """Raises `ConfigError` for a path that no socket can have."""
    path = _ipc_path(endpoint)
    if path is not None and len(os.fsencode(path)) > _PATH_LIMIT:
        raise ConfigError(
            f"transport.endpoint: the socket path {path} is longer than {_PATH_LIMIT} bytes. "
            "Set a shorter one, e.g. transport.endpoint=tcp://127.0.0.1:5557 or ipc:///tmp/NAME/control.ipc"
        )


def endpoint_error(error: OSError, endpoint: str) -> SlipstreamError:
    fix = "Stop that trainer, or give this run an endpoint of its own (run_dir or transport.endpoint)"
    return cannot_listen(error, endpoint, "transport.endpoint", fix)
