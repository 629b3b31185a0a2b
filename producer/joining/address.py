"""Where the trainer is, and who this producer is to it, by the command line alone.

Guarantee: an address over which code may come is one where the trainer proves who it is: by its key, or by the owner of its
socket. Everything else is refused before a connection is made.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from protocol.config.loader import apply_overrides
from protocol.config.sections.transport import TransportSection, is_trusted, next_endpoint
from protocol.errors import ConfigError
from protocol.security.keys import ProducerKeys, producer_keys

_GIVEN_ELSEWHERE = {"endpoint": "--connect", "blob_endpoint": "the trainer", "keys": "--keys"}
_ROOT = 0
_WILDCARDS = ("0.0.0.0", "*", "[::]", "")  # noqa: S104  compared with, not bound to


@dataclass(frozen=True)
class TrainerAddress:
    endpoint: str
    keys_folder: str | None  # absolute
    keys: ProducerKeys | None

    def blob_endpoint(self, offered: str) -> str:
        """Where blobs are, when the trainer says `offered` of it ("": nothing). Raises ConfigError if that cannot be trusted."""
        if not offered:
            return next_endpoint(self.endpoint)
        host, _, port = offered.removeprefix("tcp://").rpartition(":")
        if offered.startswith("tcp://") and host in _WILDCARDS and self.endpoint.startswith("tcp://"):
            offered = f"{self.endpoint.rpartition(':')[0]}:{port}"
        _transport(offered, self.keys_folder)
        return offered

    def check_owner(self) -> None:
        """Raises ConfigError if somebody else may listen at a socket file."""
        if self.keys is not None or not self.endpoint.startswith("ipc://"):
            return
        path = Path(self.endpoint.removeprefix("ipc://"))
        if path.exists() and path.stat().st_uid not in (os.geteuid(), _ROOT):
            raise ConfigError(
                f"--connect {self.endpoint}: the socket belongs to another user, whose code this producer would run; give both "
                "sides keys (docs/security.md), or run both as one user"
            )


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
    return TrainerAddress(endpoint, folder, keys)


def _transport(endpoint: str, keys_folder: str | None, identity: object = None) -> TransportSection:
    try:
        section = TransportSection.model_validate(
            {"keys": keys_folder or "none", "identity": identity, "endpoint": endpoint}
        )
    except ValidationError as error:
        raise ConfigError(f"--connect {endpoint}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    if not is_trusted(endpoint, has_keys=keys_folder is not None):
        raise ConfigError(
            f"--connect {endpoint}: a producer runs what the trainer gives it, so over TCP both need keys, also on loopback: "
            "name the folder of its key and of trainer.public with --keys FOLDER (docs/security.md, Set up keys)"
        )
    return section
