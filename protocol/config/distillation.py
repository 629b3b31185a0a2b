"""The sections of on-policy distillation: teachers, and how the policy learns from them.

Guarantee: a section that exists is complete; an inconsistent one is refused with its key and the fix.
"""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from protocol.config.section import HttpUrl, Label, Positive, PositiveFloat, PositiveSeconds, Problems, Section
from protocol.wire.answers import text_of_value

_OF_A_SERVER = ("key_file", "ca_file", "timeout_s", "retries", "concurrency")


def pieces(template: str) -> list[tuple[str, str | None]]:
    """Return texts, each with the name in braces behind it; {{ and }} are braces. Raise ValueError for anything else."""
    found = []
    for text, name, spec, conversion in Formatter().parse(template):
        if name is not None and (spec or conversion or not re.fullmatch(r"[^{}\[\].!:]+", name)):
            raise ValueError(f"{{{name}}}: expected the name of a column, without `.`, `[`, `!` and `:`")
        found.append((text, name))
    return found


class TeacherSection(Section):
    name: Label = Field(description="Name in `teacher_column`, metrics and logs.")
    url: HttpUrl | None = Field(None, description="Its plain `vllm serve`: `http://HOST:PORT`.")
    prompt: str | None = Field(
        None,
        min_length=1,
        description="In place of `url`: the policy teaches itself behind this prompt, with `{column}` of the row and `{prompt}`, "
        "the (last) text of the prompt.",
    )
    key_file: str | None = Field(None, description="As `engine_server.key_file`.")
    ca_file: str | None = Field(None, description="As `engine_server.ca_file`.")
    weight: PositiveFloat = Field(1.0, description="Share of the prompts, relative to others.")
    timeout_s: PositiveSeconds = Field(60.0, description="Limit of one request.")
    retries: Annotated[int, Field(ge=0, le=20)] = Field(3, description="Further tries, with growing pauses.")
    concurrency: Positive = Field(32, description="Requests at once, per producer.")

    @field_validator("prompt")
    @classmethod
    def _names_columns(cls, value: str | None) -> str | None:
        names = [name for _, name in pieces(value or "") if name is not None]
        if value is not None and not names:
            raise ValueError("expected a column as `{column}`; without one the teacher knows no more than the policy")
        return value

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `prompt` names."""
        names = (name for _, name in pieces(self.prompt or ""))
        return tuple(name for name in names if name not in (None, "prompt"))

    def filled(self, values: Mapping[str, Any]) -> str:
        """Return `prompt` with these values. Raise ValueError if one is neither text nor number."""
        named = pieces(self.prompt or "")
        return "".join(text + ("" if name is None else text_of_value(values[name], name)) for text, name in named)

    def problems(self) -> Problems:
        if (self.url is None) == (self.prompt is None):
            yield "give one of url, for a server, and prompt, for the policy itself"
        for key in _OF_A_SERVER if self.url is None else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"{key} is for a server, and the policy itself has none; remove it"
        place = urlsplit(self.url or "")
        if place.username or place.password or place.query or place.fragment:
            yield "url: expected `http://HOST:PORT` and no more; a key belongs into a file, see key_file"
        elif place.path.rstrip("/").endswith("/v1"):
            yield "url: leave the `/v1` out, it is added to the address"


MOST_TOP = 32
_TOP_K, _BETA = 16, 0.5


class DistillationSection(Section):
    mode: Literal["advantage", "divergence"] = Field(
        description="What teaches: log p_teacher - log p_policy, or a divergence."
    )
    coef: PositiveFloat = Field(1.0, description="Weight of the teachers' part of the loss.")
    alone: bool = Field(False, description="Rewards teach nothing; `sampling.num_generations` may be 1.")
    teacher_column: str | None = Field(
        None, min_length=1, description="Column that names a row's teacher. Default: by `weight`."
    )
    top_k: Annotated[int, Field(ge=1, le=MOST_TOP)] | None = Field(
        None, description="`divergence`: the teacher's likeliest tokens. Default: 16."
    )
    beta: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="`divergence`: 0 is KL(teacher, policy), 1 KL(policy, teacher). Default: 0.5."
    )

    @property
    def num_top(self) -> int:
        """The number of likeliest tokens that teachers are asked for."""
        return (self.top_k or _TOP_K) if self.mode == "divergence" else 0

    @property
    def mixture(self) -> float:
        """The share of the teacher in the mixture that both are compared with."""
        return _BETA if self.beta is None else self.beta

    def problems(self) -> Problems:
        for key, value in (("top_k", self.top_k), ("beta", self.beta)):
            if self.mode == "advantage" and value is not None:
                yield f"{key}: only with mode=divergence; remove it, or set that"
