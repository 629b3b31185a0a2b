"""The sections that say how the daemons work: endpoint, engine server, policy swaps, channels, logs, number of producers.

Guarantee: a section that exists is complete; an inconsistent one is refused with its key and the fix.
"""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from protocol.config.section import (
    Count,
    HttpUrls,
    Positive,
    PositiveFloat,
    PositiveSeconds,
    Problems,
    Section,
    problems_of_servers,
)

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ServeSection(Section):
    enabled: bool = Field(
        False, description="Each producer serves the policy to OpenAI clients while it trains. See docs/serving.md."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen at. Any but loopback needs a key.")
    port: Annotated[int, Field(ge=0, le=65_000)] = Field(
        0,
        description="0: a free one, written to `RUN_DIR/serve/`. A producer adds the index of its first GPU to any other.",
    )
    api_key_file: str | None = Field(
        None,
        description="File of keys for clients (`Authorization: Bearer`), one per line, private to the daemon's user.",
    )
    max_requests: Positive | None = Field(
        None,
        description="Completions for clients in the engine at once. Default: a quarter of `engine.max_num_seqs`.",
    )
    max_waiting: Count = Field(256, description="Requests that wait for room in the engine; more are refused with 429.")
    max_request_bytes: Annotated[int, Field(ge=1024, le=2**28)] = Field(2**20, description="Largest body of a request.")
    request_timeout_s: PositiveSeconds = Field(300.0, description="Longest time of a request with its answer.")
    receive_timeout_s: PositiveSeconds = Field(
        5.0, description="Longest time to send a request; the connection is then closed."
    )
    max_connections: Positive = Field(
        256, description="Connections at once; above it the longest idle ones are closed."
    )
    max_versions: Annotated[int, Field(ge=0, le=64)] = Field(
        2,
        description="Old versions that stay loaded for clients; the engine gets N + 2 more LoRA slots.",
    )
    version_ttl_s: PositiveSeconds = Field(
        60.0,
        description="Time for which an old version stays available after its last request.",
    )
    tool_call_parser: str | None = Field(
        None, description="vLLM's parser of the model's tool calls, such as `hermes`; needed for `tools` in requests."
    )

    @property
    def num_lora_slots(self) -> int:
        """The slots that requests of clients may need beside the slots of training."""
        return self.max_versions + 2 if self.enabled else 0

    def problems(self) -> Problems:
        if self.enabled and self.host not in LOOPBACK_HOSTS and self.api_key_file is None:
            yield (
                f"host: {self.host} can be reached from other hosts, so it needs a key: write one to a file "
                "(`umask 077; openssl rand -hex 32 > serve.key`) and set serve.api_key_file, or use 127.0.0.1"
            )


class EngineServerSection(Section):
    url: HttpUrls = Field(
        min_length=1,
        max_length=64,
        description="Address of the server, `http://HOST:PORT` or `https://...`, without `/v1`; or a list of servers.",
    )
    plugin: str = Field(
        "engine_server",
        min_length=1,
        description="Client of the server: an entry point of the group `slipstream.engines`.",
    )
    adapter_dir: str = Field(
        min_length=1,
        description="Folder for policies that producer and server share.",
    )
    server_adapter_dir: str | None = Field(
        None,
        min_length=1,
        description="Path of `adapter_dir` on the server's host. Default: the same absolute path.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="The server's name or path for `model.path`, if it differs.",
    )
    key_file: str | None = Field(
        None,
        description="File with the server's `--api-key`, readable by the daemon's user alone.",
    )
    ca_file: str | None = Field(
        None,
        description="Trusted certificates (PEM) for `https`. Default: those of the system.",
    )
    final_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = Field(
        "final",
        description="Model name under which servers keep the final policy. null: none.",
    )
    max_requests: Positive = Field(
        256,
        description="Completions of this producer in a server at once; shared out of the server's `--max-num-seqs`.",
    )
    answer_timeout_s: PositiveSeconds = Field(
        60.0,
        description="Longest time for an answer, a load or a probe; then the server counts as gone.",
    )

    def problems(self) -> Problems:
        yield from problems_of_servers(self.url)
        if any(urlsplit(url).path.rstrip("/").endswith("/v1") for url in self.url):
            yield "url: leave the `/v1` out, it is added to the address"
        if (self.final_name or "").startswith("slipstream-"):
            yield "final_name: names that begin with `slipstream-` are those of producers' own folders; choose another one"
        if self.ca_file and not any(url.startswith("https:") for url in self.url):
            yield "ca_file: it is for servers that are reached by https; use such a url, or leave it out"


TOLERANCES = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest root mean square, in nats, of the difference between two right computations of a policy's log-probs, by `model.dtype`.
On the CPU it was 0.07 in bfloat16 for a model of 30 layers."""


PROBE_EVERY = 8
"""The default of `swap.probe_every` where bits prove every version. On two busy cores a swap of 40 MB took 1.4 s by bits alone
and 6.1 s with the probe, which at every eighth swap adds 0.6 s on average."""


class SwapSection(Section):
    mode: Literal["adapter", "merged"] = Field(
        "adapter",
        description="`adapter`: vLLM serves each policy as a LoRA. `merged`: it is merged into the engine's weights, "
        "so decoding pays nothing for it.",
    )
    in_flight: Literal["finish", "continue", "restart"] | None = Field(
        None,
        description="Requests in flight when a policy arrives: `finish` on the old one, `continue` from their tokens on "
        "the new one, or `restart`. Default: `finish`; `continue` with `mode: merged`.",
    )
    probe_every: Count | None = Field(
        None,
        description="Every N versions, and for the first N of a trainer process, the engine's log-probs of prompts are compared "
        "with the trainer's ([how](swap-proof.md)). 0: never. Default: 8; 1 where bits do not prove each version.",
    )
    probe_tolerance: PositiveFloat | None = Field(
        None,
        description="Largest root mean square of log-probs, engine minus trainer, in nats: a check against other "
        "base weights. Default: by `model.dtype`; none with `engine.quantization`.",
    )
    max_refused: Positive = Field(
        3,
        description="Versions in a row that every producer refuses before the run ends (exit 81); earlier if groups "
        "of the served version are too old.",
    )

    def problems(self) -> Problems:
        if self.mode == "merged" and self.in_flight == "finish":
            old = "in_flight: finish needs the old weights, which mode: merged has replaced"
            yield f"{old}; use continue or restart, or mode: adapter"


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
    """Return whether only this host reaches `tcp://HOST:PORT`, or HOST:PORT."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0] in _LOOPBACK


def is_trusted(endpoint: str, *, has_keys: bool) -> bool:
    """Return whether who talks there is known, so that it may give or get code: by keys, or by the rights of a socket's file."""
    return has_keys or (endpoint.startswith("ipc://") and not endpoint.startswith("ipc://@"))


def next_endpoint(control: str) -> str:
    """Return the default endpoint for blobs."""
    if control.startswith("ipc://"):
        return f"{control}.blobs"
    host, _, port = control.rpartition(":")
    return f"{host}:{int(port) + 1}"


class TransportSection(Section):
    keys: _Name | None = Field(
        None,
        description="Folder of keys (docs/security.md): only authorized producers connect, encrypted. Needed for other hosts.",
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
    max_message_bytes: Annotated[int, Field(ge=65_536, le=900_000_000)] = Field(  # SQLite has rows of a billion bytes
        64 * 2**20, description="Largest frame accepted or sent."
    )
    blob_chunk_bytes: Annotated[int, Field(ge=1024, le=2**26)] = Field(2**20, description="Adapter bytes per message.")
    max_unacked_bytes: Count = Field(
        256 * 2**20,
        description="A producer pauses generation while it holds more bytes of unacknowledged groups.",
    )

    region: _PlaceName | None = Field(
        None,
        description="Region of this daemon, such as a data center. Hosts of a region take policies from each other. "
        "Default: its host.",
    )
    relay_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None,
        description="Port at which one producer of each host relays policies to other hosts.",
    )
    relay_host: _PlaceName | None = Field(
        None,
        description="Address of this host for other producers. Default: that of the interface towards the trainer.",
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
                f"{host} can be reached from other hosts, so it needs keys. Set transport.keys=keys after `slipstream keys "
                "generate trainer`, `slipstream keys generate PRODUCER` and `slipstream keys authorize PRODUCER` "
                "(docs/security.md), or use 127.0.0.1"
            )
        return value

    def problems(self) -> Problems:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            yield "heartbeat_timeout_s must be at least twice heartbeat_interval_s"
        if self.max_message_bytes < 2 * self.blob_chunk_bytes:
            yield "max_message_bytes must be at least twice blob_chunk_bytes"
        if self.relay_host is not None and self.relay_host not in _LOOPBACK and not self.keys:
            yield "relay_host: a relay that other hosts can reach needs keys; set keys, or leave relay_host out"


class ObservabilitySection(Section):
    progress: bool = Field(True, description="Progress bar on a terminal; one line per step elsewhere.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the daemons' logs.")
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="`auto`: one JSON object per line under systemd, text elsewhere."
    )
    metrics_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address of each daemon's `/metrics`, `/targets`, `/status`, `/healthz` and `/readyz`.",
    )
    trainer_metrics_port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        0,
        description="0: a free one, written to `RUN_DIR/metrics/`.",
    )
    producer_metrics_port: Annotated[int, Field(ge=0, le=65_000)] = Field(
        0, description="Like `trainer_metrics_port`; a producer adds the index of its first GPU to a port other than 0."
    )
    unresponsive_after_s: PositiveSeconds = Field(
        120.0, description="`/healthz` fails when a daemon's loop has not run for this time."
    )
    rollout_samples: Annotated[int, Field(ge=0, le=1024)] = Field(
        2, description="Completions per step that the trainer writes to `RUN_DIR/rollouts.jsonl`; 0: none."
    )
    rollouts_max_bytes: Annotated[int, Field(ge=65_536)] = Field(
        64 * 2**20,
        description="Size at which `rollouts.jsonl` becomes `rollouts.1.jsonl`.",
    )


class CheckpointsSection(Section):
    keep_adapters: Count = Field(
        100,
        description="Adapters of deleted checkpoints (`trainer.save_total_limit`) that stay in `adapters/step-N`; not `model`.",
    )


_Number = Annotated[int, Field(ge=1, le=4096)]


class ProducersSection(Section):
    min: _Number = Field(1, description="Producers that stay, however idle they are.")
    max: _Number = Field(description="Largest number of producers.")

    def problems(self) -> Problems:
        if self.min > self.max:
            yield f"min={self.min} is more than max={self.max}"
