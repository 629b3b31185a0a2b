"""What every section of the configuration has in common.

Guarantee: unknown keys are refused, a section never changes after it was made, and a boolean is no number.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]


def _place_and_name(value: str) -> str:
    """Checks the form of a user function's name, not that the function exists."""
    place, _, name = value.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError("expected `module:function` or `path/to/file.py:function`")
    return value


PlaceAndName = Annotated[str, AfterValidator(_place_and_name)]


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
