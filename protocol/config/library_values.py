"""The values of library sections, held to the fields of the classes that own them.

Guarantee: what the class takes is taken, its documented types and an unquoted `no` included; no library is imported. A value of
another type is refused with the key, what the field takes, and for one of several choices the nearest.
"""

import contextlib
import enum
import typing
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from protocol.config import trainer_keys
from protocol.config.library_fields import LibraryField, fields_of, library_name
from protocol.config.mistakes import Mistake
from protocol.config.other_names import instead_of
from protocol.config.section import nearest

_WORDS = {int: "a whole number", float: "a number", bool: "`true` or `false`", str: "text", type(None): "none"}
_NAMES = {"dict": "a mapping", "Mapping": "a mapping", "list": "a list", "set": "a list", "tuple": "a list"}


def value_mistakes(
    section: str,
    values: Mapping[str, Any],
    placed: Mapping[str, str | None],
    own: Iterable[str],
    elsewhere: Mapping[str, list[str]],
) -> Iterator[Mistake]:
    """Yield what the class of a section would not take.

    Args:
        placed: keys that are Slipstream's to set or to refuse, and what to give instead.
        own: keys of ours in the section.
        elsewhere: the places of our keys, by their names.
    """
    fields = fields_of(section) or {}
    for key, value in values.items() if fields else ():
        if key in placed or key in own:
            continue
        if key not in fields:
            valid = {name: None for name in fields if name not in placed and not name.startswith(("_", "vllm_"))}
            owners = {name: owner for name, owner in placed.items() if owner}
            hint = instead_of(section, key, valid | dict.fromkeys(own) | owners, elsewhere, "see its documentation")
            yield Mistake((section, key), f"unknown to {library_name(section)}; {hint}")
            continue
        try:
            converted(value, fields[key])
            check_choice(section, key, value)
        except ValueError as error:
            yield Mistake((section, key), f"{error} (got {value!r:.80})")


def check_choice(section: str, key: str, value: Any) -> None:
    """Raise `ValueError` for a value that TRL would only refuse in the middle of a step."""
    choices = trainer_keys.CHOICES.get(key, ()) if section == "trainer" else ()
    if choices and value not in choices:
        names = [choice for choice in choices if isinstance(choice, str)]
        raise ValueError(_of_choices(names, value))


def converted(value: Any, field: LibraryField) -> Any:
    """Convert one value to the type of its field, e.g. the YAML string `1e-5` to a float; `ValueError` if the type cannot hold
    it."""
    if value is None and field.default is None:
        return value
    choices = [choice for part in _parts(field.hint) for choice in _choices(part)]
    if value is False and bool not in _parts(field.hint) and "no" in choices:  # YAML reads an unquoted `no` so
        return "no"
    result = by_type(value, field.hint)
    return value if isinstance(result, enum.Enum) else result  # the class has members of its own


def by_type(value: Any, hint: Any) -> Any:
    """Return the value as one of the type `hint`; `ValueError` if the type cannot hold it."""
    if hint is Any or (adapter := _adapter(hint)) is None:
        return value
    parts = _parts(hint)
    try:
        result = adapter.validate_python(value)
    except ValidationError as error:
        for kind in parts:  # vLLM names its enum members in its own messages and flags
            if isinstance(kind, enum.EnumMeta) and isinstance(value, str) and value in kind.__members__:
                return kind[value]
        raise ValueError(_expected(parts, value)) from error
    if isinstance(value, bool) and not isinstance(result, bool):
        raise ValueError(_expected(parts, value))
    return result


def _expected(parts: list[Any], value: Any) -> str:
    choices = [choice for part in parts for choice in _choices(part)]
    words = [_WORDS.get(part) or _NAMES.get(getattr(typing.get_origin(part) or part, "__name__", "")) for part in parts]
    kinds = " or ".join(dict.fromkeys(word for word in words if word and word != "none"))
    if not choices:
        return f"expected {kinds or 'another type'}"
    return _of_choices(choices, value, kinds)


def _of_choices(choices: list[Any], value: Any, kinds: str = "") -> str:
    shown = [f"`{choice}`" for choice in choices]
    hint = nearest(value, [str(choice) for choice in choices], "") if isinstance(value, str) else ""
    listed = ", ".join([*shown[:-1]]) + (" or " if shown[:-1] else "") + shown[-1]
    return f"expected {listed}" + (f", or {kinds}" if kinds else "") + (f"; {hint}" if hint else "")


def _parts(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return [part for argument in typing.get_args(hint) for part in _parts(argument)]
    return [hint]


def _choices(hint: Any) -> list[Any]:
    if isinstance(hint, enum.EnumMeta):
        return [member.value for member in hint]  # type: ignore[var-annotated]
    return list(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else []


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """Return the adapter of a type; None for a type without a pydantic schema, whose values only the library can check."""
    for config in (ConfigDict(arbitrary_types_allowed=True), None):  # some types refuse a configuration
        with contextlib.suppress(Exception):
            return TypeAdapter(hint, config=config)
    return None
