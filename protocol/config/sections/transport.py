"""Section `transport`: how the two daemons reach each other.

Guarantee: an endpoint that other hosts can reach has keys.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from protocol.config.sections.section import Count, PositiveSeconds, Problems, Section


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a name, or nothing at all")
    return value


_Name = Annotated[str, AfterValidator(_not_empty)]


def _of_place(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}|\[[0-9A-Fa-f:.]{2,45}\]", value):
        raise ValueError("expected a name or an address, of letters, digits, `.`, `_` and `-`; IPv6 in brackets")
    return value


_PlaceName = Annotated[str, AfterValidator(_of_place)]
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def is_loopback(endpoint: str) -> bool:
    """Of `tcp://HOST:PORT`, or HOST:PORT: whether only this host reaches it."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0] in _LOOPBACK


def is_trusted(endpoint: str, *, has_keys: bool) -> bool:
    """Whether who talks there is known, so that it may give or get code: by keys, or by the rights of a socket's file."""
    return has_keys or (endpoint.startswith("ipc://") and not endpoint.startswith("ipc://@"))


def next_endpoint(control: str) -> str:
    """Where blobs travel unless the configuration says otherwise."""
    if control.startswith("ipc://"):
        return f"{control}.blobs"
    host, _, port = control.rpartition(":")
    return f"{host}:{int(port) + 1}"


class TransportSection(Section):
    keys: _Name | None = Field(
        None,
        description="Folder of keys, made by `rl-keys`: only authorized producers connect, and everything is encrypted. "
        "Needed for an endpoint that other hosts can reach. See docs/security.md.",
    )
    identity: _Name | None = Field(None, description="Name of the producer's key. Default: the name of its host.")
    endpoint: str | None = Field(
        None,
        description="Control channel, `ipc:///path` or `tcp://HOST:PORT`. Default: `ipc://RUN_DIR/control.ipc`.",
    )
    blob_endpoint: str | None = Field(
        None, description="Channel for adapters. Default: the ipc path with `.blobs`, or the next tcp port."
    )
    heartbeat_interval_s: PositiveSeconds = Field(1.0, description="How often a producer reports.")
    heartbeat_timeout_s: PositiveSeconds = Field(6.0, description="Silence after which the other side counts as gone.")
    max_message_bytes: Annotated[int, Field(ge=65_536, le=2**31 - 1)] = Field(
        64 * 2**20, description="Largest frame accepted or sent."
    )
    blob_chunk_bytes: Annotated[int, Field(ge=1024, le=2**26)] = Field(2**20, description="Adapter bytes per message.")
    max_unacked_bytes: Count = Field(
        256 * 2**20,
        description="A producer begins no new generation while it holds more bytes of groups that the trainer has not "
        "acknowledged.",
    )

    region: _PlaceName | None = Field(
        None,
        description="Where this daemon runs, for example a data center. Hosts of one region reach each other fast, and take "
        "policies from each other where they relay. Default: the name of its host.",
    )
    relay_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None,
        description="Port at which one producer of each host hands policies on to producers of other hosts, so that the trainer "
        "does not send each a copy. Default: none does.",
    )
    relay_host: _PlaceName | None = Field(
        None,
        description="Address of this host for those producers. Default: that of the interface that leads to the trainer.",
    )

    @field_validator("endpoint", "blob_endpoint")
    @classmethod
    def _private(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or (value.startswith("ipc://") and value != "ipc://"):
            return value
        host, separator, port = value.removeprefix("tcp://").rpartition(":")
        if not value.startswith("tcp://") or not separator or not port.isdigit() or not 0 < int(port) < 65_535:
            raise ValueError("expected `ipc:///path` or `tcp://HOST:PORT`")
        if host not in _LOOPBACK and not info.data.get("keys"):
            raise ValueError(
                f"{host} can be reached from other hosts, so it needs keys. Set transport.keys=keys after `rl-keys generate "
                "trainer`, `rl-keys generate PRODUCER` and `rl-keys authorize PRODUCER` (docs/security.md), or use 127.0.0.1"
            )
        return value

    def problems(self) -> Problems:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            yield "heartbeat_timeout_s must be at least twice heartbeat_interval_s"
        if self.max_message_bytes < 2 * self.blob_chunk_bytes:
            yield "max_message_bytes must be at least twice blob_chunk_bytes"
        if self.relay_host is not None and self.relay_host not in _LOOPBACK and not self.keys:
            yield "relay_host: a relay that other hosts can reach needs keys; set keys, or leave relay_host out"
