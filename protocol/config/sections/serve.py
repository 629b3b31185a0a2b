"""The section of the OpenAI-compatible endpoint that producers serve.

Guarantee: an endpoint that other hosts can reach has a key.
"""

from typing import Annotated

from pydantic import Field

from protocol.config.sections.section import Count, Positive, PositiveSeconds, Problems, Section

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
        description="File of the keys that clients may send as `Authorization: Bearer`, one per line, readable by the "
        "daemon's user alone.",
    )
    max_requests: Positive | None = Field(
        None,
        description="Completions for clients in the engine at once; others wait. Default: a quarter of `engine.max_num_seqs`.",
    )
    max_waiting: Count = Field(256, description="Requests that wait for room in the engine; more are refused with 429.")
    max_request_bytes: Annotated[int, Field(ge=1024, le=2**28)] = Field(2**20, description="Largest body of a request.")
    request_timeout_s: PositiveSeconds = Field(
        300.0, description="Longest time of a request, from its first byte to the last one of its answer."
    )
    receive_timeout_s: PositiveSeconds = Field(
        5.0, description="Longest time that a client may take to send a request; its connection is then closed."
    )
    max_connections: Positive = Field(
        256, description="Connections at once; with more, those that have waited longest without a request are closed."
    )
    max_versions: Annotated[int, Field(ge=0, le=64)] = Field(
        2,
        description="Superseded versions that stay loaded because clients ask for them by name. The engine has as many more "
        "LoRA slots, and two for requests that outlive their version.",
    )
    version_ttl_s: PositiveSeconds = Field(
        60.0,
        description="How long a superseded version can still be asked for after the last request that it answered.",
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
