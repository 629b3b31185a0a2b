"""Section `engine_server`: a vLLM server that is already running, in place of an engine of the producer's own.

Guarantee: an address holds no secret, because addresses are logged.
"""

from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from protocol.config.sections.section import HttpUrl, Positive, PositiveSeconds, Problems, Section


class EngineServerSection(Section):
    url: list[HttpUrl] = Field(
        min_length=1,
        max_length=64,
        description="Address of the server, `http://HOST:PORT` or `https://...`, without the `/v1`. One, or a list of servers of "
        "the same model, among which groups are spread.",
    )
    adapter_dir: str = Field(
        min_length=1,
        description="Folder through which policies reach the server: the producer writes to it, the server reads from it. Each "
        "producer makes a folder of its own in it.",
    )
    server_adapter_dir: str | None = Field(
        None,
        min_length=1,
        description="The same folder by the path that it has for the server. Default: `adapter_dir`, as an absolute path.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="What the server was started with as its model, where that is another path or name for `model.path`.",
    )
    key_file: str | None = Field(
        None,
        description="File with the server's `--api-key`, readable by the daemon's user alone. It is sent as `Authorization: "
        "Bearer`.",
    )
    ca_file: str | None = Field(
        None,
        description="Certificates (PEM) that an `https` server's is checked against. Default: those that the system trusts.",
    )
    max_requests: Positive = Field(
        256,
        description="Completions of this producer in a server at once, about the server's `--max-num-seqs`, or a share of it "
        "where producers share a server.",
    )
    answer_timeout_s: PositiveSeconds = Field(
        60.0,
        description="Longest time for the server to say that it is there, to take up an adapter, or to compute a probe; then it "
        "counts as gone until it answers again. Generation may take as long as a lease.",
    )

    @field_validator("url", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def problems(self) -> Problems:
        for url in self.url:
            place = urlsplit(url)
            if place.username or place.password or place.query or place.fragment:
                yield "url: expected `http://HOST:PORT` and no more; a key belongs into a file, see engine_server.key_file"
            elif place.path.rstrip("/").endswith("/v1"):
                yield "url: leave the `/v1` out, it is added to the address"
        if len({url.rstrip("/") for url in self.url}) != len(self.url):
            yield "url: the same server is named twice"
        if self.ca_file and not any(url.startswith("https:") for url in self.url):
            yield "ca_file: it is for servers that are reached by https; use such a url, or leave it out"
