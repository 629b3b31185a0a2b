"""Snapshots of the hub, fetched into the cache of this host.

Guarantee: nothing is fetched for which the disk has no room. The log says how far a download is, and an error its cause and cure.
Processes of this host that fetch the same at once wait for each other, file by file (huggingface_hub).
"""

import errno
import functools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, SlipstreamError
from protocol.library_errors import reason_of

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0
_GB = 1e9
_TOKEN = "give a token that may read it (`hf auth login`, or HF_TOKEN)"  # noqa: S105  the words, not a token


@functools.cache
def snapshot(name: str, revision: str | None, patterns: tuple[str, ...], key: str) -> Path:
    """Return the folder with the files of these patterns. The hub is asked once in a process.

    Args:
        key: of the configuration, by which the user named it.

    Raises:
        ConfigError: it cannot be had.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    fetch = functools.partial(snapshot_download, name, revision=revision, allow_patterns=list(patterns))
    cache, had_bars = Path(constants.HF_HUB_CACHE), not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        if needed := _needed_bytes(fetch):
            _check_room(f"{key}: {name}", needed, cache)
            logger.info("downloading %s (%.1f GB) to %s", name, needed / _GB, cache)
            with _progress(name, needed, cache / f"models--{name.replace('/', '--')}" / "blobs"):
                return Path(fetch())
        return Path(fetch())
    except SlipstreamError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}: {name} is no folder here ({Path(name).absolute()}) and cannot be fetched from the hub: "
            f"{_reason(error, name, revision)}"
        ) from error
    finally:
        if had_bars:
            enable_progress_bars()


def _needed_bytes(fetch: Callable[..., Any]) -> int:
    """Return the size of the files that are not in the cache; 0 also where the hub does not say it."""
    from huggingface_hub.errors import DryRunError

    try:
        files: Sequence[Any] = fetch(dry_run=True)
    except DryRunError:  # what the cache has may be enough
        return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


def _check_room(what: str, needed: int, cache: Path) -> None:
    place = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{what} takes {needed / _GB:.1f} GB, and {place} has {free / _GB:.1f} GB free; make room, or set HF_HOME to a "
            "folder of another disk"
        )


@contextmanager
def _progress(name: str, needed: int, blobs: Path) -> Iterator[None]:
    """Say every few seconds how much has arrived."""
    done, began, before = threading.Event(), time.monotonic(), _size(blobs)

    def say() -> None:
        while not done.wait(_SAY_EVERY_S):
            arrived, passed = _size(blobs) - before, time.monotonic() - began
            logger.info("downloading %s: %.1f of %.1f GB after %.0f s", name, arrived / _GB, needed / _GB, passed)

    thread = threading.Thread(target=say, name="downloading", daemon=True)
    thread.start()
    try:
        yield
        logger.info("downloaded %s in %.0f s", name, time.monotonic() - began)
    finally:
        done.set()
        thread.join()


def _size(folder: Path) -> int:
    sizes = 0
    for file in folder.glob("*"):
        try:
            sizes += file.stat().st_size
        except OSError:  # it has got its final name meanwhile
            continue
    return sizes


def _reason(error: Exception, name: str, revision: str | None) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    elsewhere = f"or download it where there is a network (`hf download {name} --local-dir FOLDER`) and name the folder"
    if isinstance(error, GatedRepoError):
        return f"it is gated; accept its terms at {constants.ENDPOINT}/{name}, and {_TOKEN}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private; correct the name, or {_TOKEN}"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision}; correct that"
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
    if isinstance(cause, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and the cache has no whole copy; unset it, {elsewhere}"
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return f"the hub refuses it (HTTP {status}); " + (
            _TOKEN if status in (401, 403) else f"try again later, {elsewhere}"
        )
    if isinstance(error, LocalEntryNotFoundError):
        why = reason_of(cause if isinstance(cause, Exception) else error)
        return (
            f"{constants.ENDPOINT} does not answer ({why}), and the cache has no whole copy; look at the network, HTTPS_PROXY "
            f"and HF_ENDPOINT, {elsewhere}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{constants.HF_HUB_CACHE} has no room left; make room, or set HF_HOME to a folder of another disk"
    return reason_of(error)
