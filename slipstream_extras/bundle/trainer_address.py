"""Address of the trainer and identity of this producer, from the command line alone.

Guarantee: an address over which code may come is one where the trainer proves who it is: by its key, or by the owner of its
socket, in a folder where no other user can put one. Everything else is refused before a connection is made.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from protocol.channel.channel import check_path_length
from protocol.channel.keys import ProducerKeys, producer_keys
from protocol.config.loader import apply_overrides
from protocol.config.mistakes import collected
from protocol.config.operation import TransportSection, is_trusted, next_endpoint
from protocol.errors import ConfigError

_GIVEN_ELSEWHERE = {"endpoint": "--connect", "blob_endpoint": "the trainer", "keys": "--keys"}
_ROOT = 0
_SHARED = stat.S_IWGRP | stat.S_IWOTH  # with an access list, the bits of the group are its mask
_WILDCARDS = ("0.0.0.0", "*", "[::]", "")  # noqa: S104  compared with, not bound to


@dataclass(frozen=True)
class TrainerAddress:
    endpoint: str
    keys_folder: str | None  # absolute
    keys: ProducerKeys | None

    def blob_endpoint(self, offered: str) -> str:
        """Return the address of blobs; the trainer offers `offered`, "" if none. Raises ConfigError if that cannot be trusted."""
        if not offered:
            return next_endpoint(self.endpoint)
        host, _, port = offered.removeprefix("tcp://").rpartition(":")
        if offered.startswith("tcp://") and host in _WILDCARDS and self.endpoint.startswith("tcp://"):
            offered = f"{self.endpoint.rpartition(':')[0]}:{port}"
        _transport(offered, self.keys_folder)
        return offered

    def check_owner(self) -> None:
        """Raise ConfigError if another user may have answered at a socket file, which is gone in that case or not its own."""
        if self.keys is not None or not self.endpoint.startswith("ipc://"):
            return
        path = Path(self.endpoint.removeprefix("ipc://"))
        try:
            found = path.lstat()
        except OSError as error:
            raise _untrusted(self.endpoint, f"{path} is gone ({error.strerror})") from error
        if not stat.S_ISSOCK(found.st_mode) or not _is_ours(found):
            raise _untrusted(self.endpoint, f"{path} is no socket of this user, but {_described(found)}")


def trainer_address(endpoint: str, keys_folder: str | None, overrides: list[str]) -> TrainerAddress:
    """
    Args:
        overrides: as given with --set; of section `transport` only the identity is looked at.

    Raises:
        ConfigError: it is no address, needs keys, or the keys are not there.
    """
    given: dict[str, dict[str, object]] = {}
    apply_overrides(given, overrides)
    own = given.get("transport") or {}
    for key, place in _GIVEN_ELSEWHERE.items():
        if key in own:
            raise ConfigError(f"--set transport.{key}: with --connect it comes from {place}")
    folder = os.path.abspath(keys_folder) if keys_folder is not None else None
    transport = _transport(endpoint, folder, identity=own.get("identity"))
    keys = producer_keys(Path(folder), transport.identity) if folder is not None else None
    if keys is None and endpoint.startswith("ipc://"):
        endpoint = _private(endpoint)
    return TrainerAddress(endpoint, folder, keys)


def _transport(endpoint: str, keys_folder: str | None, identity: object = None) -> TransportSection:
    values = {"keys": keys_folder or "none", "identity": identity, "endpoint": endpoint}
    result = collected(TransportSection, values)
    if result.mistakes:
        raise ConfigError("\n".join(f"--connect {endpoint}: {mistake.text}" for mistake in result.mistakes))
    section: TransportSection = result.made
    if not is_trusted(endpoint, has_keys=keys_folder is not None):
        raise ConfigError(
            f"--connect {endpoint}: a producer runs what the trainer gives it, so over TCP both need keys, also on loopback: "
            "name the folder of its key and of trainer.public with --keys FOLDER (docs/security.md, Set up keys)"
        )
    return section


def _private(endpoint: str) -> str:
    """The endpoint without links in its path. Raises ConfigError if another user can put a socket there."""
    path = Path(endpoint.removeprefix("ipc://"))
    place = Path(os.path.realpath(path.parent))
    existing = [folder for folder in (place, *place.parents) if folder.exists()]
    for folder in existing:
        found = folder.lstat()
        # In a sticky folder no user renames or removes the files of others, but everybody adds what is missing.
        is_open = found.st_mode & _SHARED and not (folder != existing[0] and found.st_mode & stat.S_ISVTX)
        if is_open or not _is_ours(found):
            fix = f"make {folder} writable for this user alone (chmod go-w), or name a socket in a folder of its own"
            raise _untrusted(endpoint, f"{folder} is {_described(found)}; {fix}")
    private = f"ipc://{place / path.name}"
    check_path_length(private)
    return private


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), _ROOT)


def _described(found: os.stat_result) -> str:
    return f"{stat.filemode(found.st_mode)} of user {found.st_uid}"


def _untrusted(endpoint: str, why: str) -> ConfigError:
    return ConfigError(
        f"--connect {endpoint}: this producer would run the code of the process that listens there, and {why}. Without keys "
        "(docs/security.md) the socket has to be this user's, in a folder that no other user can write to"
    )
