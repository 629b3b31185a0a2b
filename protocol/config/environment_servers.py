"""Options of environments that are servers of the user's, to which producers connect.

Guarantee: options that exist are complete; inconsistent ones are refused with their key and the fix.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from protocol.config.distillation import pieces
from protocol.config.section import HttpUrl, HttpUrls, Positive, PositiveSeconds, Problems, Section, problems_of_servers
from protocol.wire.answers import text_of_value


class OpenEnvOptions(Section):
    url: HttpUrls = Field(min_length=1, max_length=64, description="Server, `http://HOST:PORT`, or a list.")
    action: str | None = Field(
        None,
        min_length=1,
        description="Field of an action for the text of a turn; `json`: the text is the action. Default: tools, or the only "
        "required field.",
    )
    observation: str | None = Field(
        None,
        min_length=1,
        description="Field of an observation to show. Default: the only one, or all as JSON.",
    )
    arguments: list[str] = Field([], description="Columns that `reset` gets by name.")
    seed: str | None = Field(
        None, min_length=1, description="Column with the seed of `reset`. Default: the number of the prompt."
    )
    reward: Literal["sum", "last", "max"] = Field("sum", description="Reward of an episode, of those of its steps.")
    key_file: str | None = Field(None, description="As `engine_server.key_file`.")
    ca_file: str | None = Field(None, description="As `engine_server.ca_file`.")

    def problems(self) -> Problems:
        yield from problems_of_servers(self.url)


SERVERS: dict[str, type[Section]] = {"openenv": OpenEnvOptions}
"""The factories that connect to servers, and are no code of the user's."""


class SimulatedUserOptions(Section):
    url: HttpUrl = Field(description="OpenAI-compatible server, without `/v1`.")
    model: str = Field(min_length=1, description="Its model.")
    prompt: str = Field(min_length=1, description="System prompt, with `{column}` of the row.")
    stop: str | None = Field(None, min_length=1, description="Word by which it ends the episode.")
    max_tokens: Positive = Field(512, description="Longest answer.")
    timeout_s: PositiveSeconds = Field(
        20.0, description="Limit of one answer, all tries included; below `call_timeout_s`."
    )
    retries: Annotated[int, Field(ge=0, le=20)] = Field(3, description="Further tries.")
    key_file: str | None = Field(None, description="As `engine_server.key_file`.")
    ca_file: str | None = Field(None, description="As `engine_server.ca_file`.")

    @field_validator("prompt")
    @classmethod
    def _is_a_template(cls, value: str) -> str:
        pieces(value)
        return value

    def filled(self, columns: Mapping[str, Any]) -> str:
        """Return `prompt` with the row's values. Raise ValueError if the row lacks one, or has neither text nor number."""
        named = pieces(self.prompt)
        lacking = [name for _, name in named if name is not None and columns.get(name) in (None, "")]
        if lacking:
            raise ValueError(f"the row has nothing as {lacking[0]!r}, which options.prompt names")
        return "".join(text + ("" if name is None else text_of_value(columns[name], name)) for text, name in named)

    def problems(self) -> Problems:
        if urlsplit(self.url).path.rstrip("/").endswith("/v1"):
            yield "url: leave the `/v1` out, it is added to the address"


FACTORIES: dict[str, type[Section]] = SERVERS | {"simulated_user": SimulatedUserOptions}
"""The factories whose options are known here."""
