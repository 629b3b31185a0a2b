"""What every section of the configuration has in common.

Guarantee: unknown keys are refused, a section never changes after it was made, and a boolean is no number.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]
PositiveFloat = Annotated[float, Field(gt=0)]
Problems = Iterator[str]
Share = Annotated[float, Field(gt=0, le=1)]


def _place_and_name(value: str) -> str:
    """Checks the form of a user function's name, not that the function exists."""
    place, _, name = value.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError("expected `module:function` or `path/to/file.py:function`")
    return value


PlaceAndName = Annotated[str, AfterValidator(_place_and_name)]


def _http(value: str) -> str:
    place = urlsplit(value)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ValueError("expected `http://HOST:PORT/PATH` or `https://...`")
    return value


HttpUrl = Annotated[str, AfterValidator(_http)]


class Section(BaseModel):
    model_config = ConfigDict(
        defer_build=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_boolean_for_number(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        result = validate(value)
        if isinstance(value, bool) and not isinstance(result, bool):
            raise ValueError("expected a number, not a boolean")
        return result

    def problems(self) -> Problems:
        """What cannot be between its values. The first one is reported."""
        yield from ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self
