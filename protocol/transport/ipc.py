"""Endpoints that are files: ipc paths.

Guarantee: one process at a time serves a path. ZeroMQ would let a second process take a path over from a live one, so a lock file
beside the path is locked first. A socket that a dead process left is removed; a file that is no socket is refused and kept.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import ConfigError, SlipstreamError, cannot_listen
from protocol.files.scratch import private

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
        lock = open(f"{path}.lock", "ab", opener=private)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"transport.endpoint: cannot create {error.filename or path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise endpoint_error(error, endpoint) from error
        if path.is_socket():  # of a dead process
            path.unlink()
        elif path.exists():  # ZeroMQ would remove whatever is there
            raise ConfigError(f"transport.endpoint: {path} exists and is not a socket; name another path")
        yield


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
