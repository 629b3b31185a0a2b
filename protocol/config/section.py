"""The base of every section of the configuration, and the types of the schema in words.

Guarantee: unknown keys are refused, a section never changes after it was made, and a boolean is no number. Refusals and
docs/configuration.md have the same words for a type; a type without words raises.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from protocol.config.functions import check_plugin, is_plugin

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]
PositiveFloat = Annotated[float, Field(gt=0)]
Problems = Iterator[str]
Share = Annotated[float, Field(gt=0, le=1)]


def _place_and_name(value: str) -> str:
    """Check the form of a user function's name, not that the function exists."""
    place, _, name = value.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError("expected `module:function` or `path/to/file.py:function`")
    return value


PlaceAndName = Annotated[str, AfterValidator(_place_and_name)]


def _label(value: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,64}", value):
        raise ValueError("expected 1 to 64 letters, digits, `_`, `.` or `-`")
    return value


Label = Annotated[str, AfterValidator(_label)]
"""A name that is a label of metrics."""


def place_or_plugin(group: str, shipped: Iterable[str]) -> AfterValidator:
    """Return the validator of a key that names either code of the user's or a plugin of `group`."""

    def checked(value: str) -> str:
        if not is_plugin(value):
            return _place_and_name(value)
        check_plugin(group, value, shipped, "Code of yours is `module:name` or `path/to/file.py:name`")
        return value

    return AfterValidator(checked)


def _http(value: str) -> str:
    place = urlsplit(value)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ValueError("expected `http://HOST:PORT/PATH` or `https://...`")
    return value


HttpUrl = Annotated[str, AfterValidator(_http)]
HttpUrls = Annotated[list[HttpUrl], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""A list of addresses, or one."""


def problems_of_servers(urls: list[str]) -> Problems:
    """Yield the errors of addresses of servers, in the words of their key `url`."""
    for url in urls:
        place = urlsplit(url)
        if place.username or place.password or place.query or place.fragment:
            yield "url: expected `http://HOST:PORT` and no more; a key belongs into a file, see key_file"
    if len({url.rstrip("/") for url in urls}) != len(urls):
        yield "url: the same server is named twice"


COLLECT = "collect"
"""The context of a validation that leaves contradictions to `Section.all_problems`."""


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
        """Yield contradictions between the values."""
        yield from ()

    def all_problems(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the contradictions in this section and those below it, each with the place of its section."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for number, part in enumerate(value if isinstance(value, list) else [value]):
                place = (name, number) if isinstance(value, list) else (name,)
                for below, problem in part.all_problems() if isinstance(part, Section) else ():
                    yield (*place, *below), problem
        for problem in self.problems():
            yield (), problem

    @model_validator(mode="after")
    def _is_consistent(self, info: ValidationInfo) -> Self:
        for problem in self.problems() if info.context != COLLECT else ():
            raise ValueError(problem)
        return self


_NO_BOUND = 1e9  # bounds from here on only keep values representable on the wire
_WORDS = {str: "text", bool: "`true` or `false`", int: "integer", float: "number"}
_ARTICLES = {"whole": "a ", "number": "a ", "list": "a ", "mapping": "a "}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def type_in_words(annotation: Any, constraints: Iterable[Any] = ()) -> str:
    """A description such as "integer >= 1" or "number from 0 to 1, or none". `constraints` are those
    of pydantic or annotated_types. A type that has no words yet raises `KeyError` or `ValueError`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [constraint for field in arguments[1:] for constraint in getattr(field, "metadata", ())]
        return type_in_words(arguments[0], [*inner, *constraints])
    if origin in (Union, UnionType):
        first, *others = ("none" if part is NoneType else type_in_words(part, constraints) for part in arguments)
        return (", or " if " " in first else " or ").join((first, *others))
    if origin is Literal:
        *others, last = (f"`{value}`" for value in arguments)
        return " or ".join(part for part in (", ".join(others), last) if part)
    if origin is list:
        return "list of " + ("mappings" if is_section(arguments[0]) else type_in_words(arguments[0]))
    if origin is dict or is_section(annotation):
        return "mapping"
    return f"{_WORDS[annotation]} {_bounds_in_words(constraints)}".strip()


def expected(annotation: Any, constraints: Iterable[Any] = ()) -> str:
    """The type as a refusal says it: "expected a whole number from 0 to 64, or `auto`"."""
    words = type_in_words(annotation, constraints).replace("integer", "whole number")
    return f"expected {_ARTICLES.get(words.partition(' ')[0], '')}{words}"


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def is_compound(annotation: Any) -> bool:
    """Return whether a field takes values of several types: pydantic then reports each type by itself."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return len([part for part in parts if part is not NoneType]) > 1


def nearest(name: str, names: Sequence[str], otherwise: str) -> str:
    """A hint for an unknown `name`: the nearest of `names`, or `otherwise`."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{close[0]}`?" if close else otherwise


def _bounds_in_words(constraints: Iterable[Any]) -> str:
    bounds = {
        name: getattr(constraint, name)
        for constraint in constraints
        for name in _SIGNS
        if getattr(constraint, name, None) is not None and getattr(constraint, name) < _NO_BOUND
    }
    if set(bounds) == {"ge", "le"}:
        return f"from {bounds['ge']:,} to {bounds['le']:,}"
    return " and ".join(f"{_SIGNS[name]} {bound:,}" for name, bound in bounds.items())
