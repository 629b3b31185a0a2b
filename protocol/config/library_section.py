"""Sections that belong to a library are validated by that library.

Guarantee: `build` returns an instance of the library's own class or raises `ConfigError` naming the section, the key, the
value and, for an unknown key, the nearest name that the installed release knows.
"""

import difflib
import enum
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from protocol.errors import ConfigError

Built = TypeVar("Built")


def build(section: str, factory: Callable[..., Built], values: dict[str, Any], **ours: Any) -> Built:
    """Calls `factory(**values, **ours)` after checking names and types against its signature and type hints.

    Args:
        section: name of the section in the configuration file, for messages.
        factory: the library's class, such as `trl.GRPOConfig`.
        values: what the user wrote.
        ours: what Slipstream adds.

    Raises:
        ConfigError: the library does not know a key or refuses a value.
    """
    names = list(inspect.signature(factory).parameters)
    checked = {}
    for key, value in values.items():
        if key not in names:
            raise ConfigError(f"{section}.{key}: {unknown(key, names, _name(factory))}")
        try:
            checked[key] = convert(value, type_hint(factory, key), _name(factory))
        except ValueError as error:
            raise ConfigError(f"{section}.{key}: {error}") from error
    try:
        return factory(**checked, **ours)
    except Exception as error:
        raise ConfigError(f"{section}: refused by {_name(factory)}: {_first_lines(error)}") from error


def unknown(key: str, names: list[str], library: str) -> str:
    """What to say of a key that is not among the `names` that the library knows."""
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"see the documentation of {library}"
    return f"unknown to {library}; {hint}"


def convert(value: Any, hint: Any, library: str) -> Any:
    """One value as the type `hint`, e.g. the YAML string `1e-5` as a float.

    Raises:
        ValueError: the type cannot hold it.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError):
        try:
            adapter = TypeAdapter(hint)
        except Exception:  # a type pydantic has no schema for: left to the library
            return value
    except Exception:
        return value
    try:
        result = adapter.validate_python(value)
    except ValidationError as error:
        for kind in (hint, *typing.get_args(hint)):  # vLLM names its enum members in its own messages and flags
            if isinstance(kind, enum.EnumMeta) and isinstance(value, str) and value in kind.__members__:
                return kind[value]
        problem = ", or: ".join(sorted({problem["msg"] for problem in error.errors()}))  # a union says one per member
        raise ValueError(f"{problem} (got {value!r}), says {library}") from error
    if isinstance(value, bool) and not isinstance(result, bool):
        raise ValueError(f"expected a number, not a boolean (got {value!r}), says {library}")
    return result


def type_hint(factory: Callable[..., Any], key: str) -> Any:
    """The type of one argument. One at a time, because vLLM has hints that only resolve while type checking."""
    for owner in inspect.getmro(factory) if inspect.isclass(factory) else (factory,):
        annotation = inspect.get_annotations(owner).get(key)
        if annotation is not None:
            alone = type("Alone", (), {"__annotations__": {key: annotation}, "__module__": owner.__module__})
            try:
                return typing.get_type_hints(alone, include_extras=True)[key]
            except (NameError, TypeError):
                return Any
    return Any


def _name(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__.partition('.')[0]}.{getattr(factory, '__name__', factory)}"


def _first_lines(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return "\n".join(text.splitlines()[:6])
