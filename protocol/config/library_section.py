"""Sections that belong to a library are validated by that library.

Guarantee: `build` returns an instance of the library's own class, or raises `ConfigError` with the section, the key, the value
and, for an unknown key, the nearest name that the installed release knows.
"""

import contextlib
import enum
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from protocol.config.type_names import nearest
from protocol.errors import ConfigError, DeviceError, is_device_failure

Built = TypeVar("Built")
_MAX_LINES = 6  # of a library's error


def build(section: str, factory: Callable[..., Built], values: dict[str, Any], **ours: Any) -> Built:
    """Returns `factory(**values, **ours)` after checking what the user wrote against its signature and type hints. Raises
    `ConfigError` where the library does not know a key or refuses a value, and `DeviceError` where it found a GPU that fails;
    `section` is its name in the configuration file."""
    library = f"{factory.__module__.partition('.')[0]}.{getattr(factory, '__name__', factory)}"
    names = list(inspect.signature(factory).parameters)
    checked = {}
    for key, value in values.items():
        if key not in names:
            hint = nearest(key, names, f"see the documentation of {library}")
            raise ConfigError(f"{section}.{key}: unknown to {library}; {hint}")
        try:
            checked[key] = _converted(value, _type_hint(factory, key))
        except ValueError as error:
            raise ConfigError(f"{section}.{key}: {error} (got {value!r}), says {library}") from error
    try:
        return factory(**checked, **ours)
    except Exception as error:
        text = str(error) or type(error).__name__
        shown = "\n".join(text.splitlines()[:_MAX_LINES])
        if is_device_failure(error):
            raise DeviceError(
                f"the GPU failed when {library} looked at it: {shown}; nvidia-smi shows its state"
            ) from error
        raise ConfigError(f"{section}: refused by {library}: {shown}") from error


def _converted(value: Any, hint: Any) -> Any:
    """One value as the type `hint`, e.g. the YAML string `1e-5` as a float; `ValueError` if the type cannot hold it."""
    adapter = _adapter(hint)
    if adapter is None:
        return value
    try:
        result = adapter.validate_python(value)
    except ValidationError as error:
        for kind in (hint, *typing.get_args(hint)):  # vLLM names its enum members in its own messages and flags
            if isinstance(kind, enum.EnumMeta) and isinstance(value, str) and value in kind.__members__:
                return kind[value]
        # a union has one problem for each of its types
        raise ValueError(", or: ".join(sorted({problem["msg"] for problem in error.errors()}))) from error
    if isinstance(value, bool) and not isinstance(result, bool):
        raise ValueError("expected a number, not a boolean")
    return result


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """None for a type without a pydantic schema, whose values only the library can check."""
    for config in (ConfigDict(arbitrary_types_allowed=True), None):  # some types refuse a configuration
        with contextlib.suppress(Exception):
            return TypeAdapter(hint, config=config)
    return None


def _type_hint(factory: Callable[..., Any], key: str) -> Any:
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
