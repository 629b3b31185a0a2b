"""`--check`: all mistakes of a configuration in one round.

Guarantee: no heavy library is imported. Every mistake of every section is in one error, each with its line. What was not looked
at is told.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from protocol.check.inputs import Inputs
from protocol.config.library_fields import fields_of, library_name
from protocol.config.library_section import OWN_KEYS, RESERVED, placed_keys
from protocol.config.library_values import value_mistakes
from protocol.config.loader import read, strict
from protocol.config.mistakes import Mistake, collected, places_of_keys
from protocol.config.run import RunConfig

_JUDGED = {"lora": ("r",)}
"""Keys of libraries whose type our own rules look at."""


class Checked(NamedTuple):
    """A configuration without mistakes. `not_looked_at` has a line for each thing that another command looks at."""

    config: RunConfig
    not_looked_at: list[str]


def check_file(
    path: str, overrides: list[str] | None = None, more: Callable[[RunConfig], Iterable[Mistake]] = lambda config: ()
) -> Checked:
    """Check a file with all that it names on this machine.

    Args:
        more: mistakes of the command line beside the file.

    Raises:
        SlipstreamError: has all mistakes.
    """
    values, source = read(path, overrides)
    result = collected(RunConfig, values)
    mistakes, not_looked_at = [*result.mistakes, *library_mistakes(values)], []
    if result.made is not None:
        inputs = Inputs(result)
        mistakes += [*inputs.mistakes(), *more(result.made)]
        not_looked_at = inputs.not_looked_at
    source.refuse(mistakes)
    return Checked(strict(values, source), [*_without_library(), *not_looked_at])


def check_library_sections(path: str, overrides: list[str] | None = None) -> RunConfig:
    """Read a file, and check the names and types of its library sections; `ConfigError` has all mistakes."""
    values, source = read(path, overrides)
    source.refuse([*collected(RunConfig, values).mistakes, *library_mistakes(values)])
    return strict(values, source)


def library_mistakes(values: dict[str, Any]) -> Iterator[Mistake]:
    """Yield what the classes of libraries would refuse in their sections."""
    places = places_of_keys(RunConfig)
    for name in RESERVED:
        if isinstance(section := values.get(name), dict):
            own = {*OWN_KEYS.get(name, {}), *_JUDGED.get(name, ())}
            section = {key: value for key, value in section.items() if isinstance(key, str)}
            yield from value_mistakes(name, section, placed_keys(name, section), own, places)


def _without_library() -> Iterator[str]:
    for name in RESERVED:
        if fields_of(name) is None:
            yield f"{name}: {library_name(name)} is not found here"
