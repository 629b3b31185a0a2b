"""Section `transport`: how the two daemons reach each other.

Guarantee: an endpoint that other hosts can reach has keys.
"""

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from protocol.config.sections.section import PositiveSeconds, Section


class TransportSection(Section):
    keys: str | None = Field(
        None,
        description="Folder of keys, made by `rl-keys`: only authorized producers connect, and everything is encrypted. "
        "Needed for an endpoint that other hosts can reach. See docs/security.md.",
    )
    identity: str | None = Field(None, description="Name of the producer's key. Default: the name of its host.")
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
    max_unacked_bytes: Annotated[int, Field(ge=0)] = Field(
        256 * 2**20,
        description="A producer begins no new generation while it holds more bytes of groups that the trainer has not "
        "acknowledged.",
    )

    @field_validator("keys", "identity")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("expected a name, or nothing at all")
        return value

    @field_validator("endpoint", "blob_endpoint")
    @classmethod
    def _private(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or (value.startswith("ipc://") and value != "ipc://"):
            return value
        host, separator, port = value.removeprefix("tcp://").rpartition(":")
        if not value.startswith("tcp://") or not separator or not port.isdigit() or not 0 < int(port) < 65_535:
            raise ValueError("expected `ipc:///path` or `tcp://HOST:PORT`")
        if host not in ("127.0.0.1", "localhost", "[::1]") and not info.data.get("keys"):
            raise ValueError(
                f"{host} can be reached from other hosts, so it needs keys. Set transport.keys=keys after `rl-keys generate "
                "trainer`, `rl-keys generate PRODUCER` and `rl-keys authorize PRODUCER` (docs/security.md), or use 127.0.0.1"
            )
        return value

    @model_validator(mode="after")
    def _timeout_above_interval(self) -> "TransportSection":
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout_s must be at least twice heartbeat_interval_s")
        if self.max_message_bytes < 2 * self.blob_chunk_bytes:
            raise ValueError("max_message_bytes must be at least twice blob_chunk_bytes")
        return self
