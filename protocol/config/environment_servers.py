"""Options of environments that are servers of the user's, to which producers connect.

Guarantee: options that exist are complete; inconsistent ones are refused with their key and the fix.
"""

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from protocol.config.section import HttpUrl, Problems, Section


class OpenEnvOptions(Section):
    url: list[HttpUrl] = Field(min_length=1, max_length=64, description="Server, `http://HOST:PORT`, or a list.")
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

    @field_validator("url", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def problems(self) -> Problems:
        for url in self.url:
            place = urlsplit(url)
            if place.username or place.password or place.query or place.fragment:
                yield "url: expected `http://HOST:PORT` and no more; a key belongs into a file, see key_file"
        if len({url.rstrip("/") for url in self.url}) != len(self.url):
            yield "url: the same server is named twice"


SERVERS: dict[str, type[Section]] = {"openenv": OpenEnvOptions}
"""The factories that connect to servers, and are no code of the user's."""
