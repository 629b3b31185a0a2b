"""The places of a configuration's values: lines of its file, and overrides of the command line.

Guarantee: every mistake names the file with the line of its own key, or the override that gave the value.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from protocol.config.mistakes import Mistake, Place, dotted, words_of
from protocol.errors import ConfigError, DeviceError

_SECRETS = ("token", "key", "password", "secret")


class Source:
    """Tell where the values of a configuration come from.

    Attributes:
        path: of the file, or a name for values that are of none.
        node: of the file's YAML, which has the lines; None for values of no file.
        overrides: the texts of the command line, by their keys.
        twice: the lines of keys that are given twice, and what is said of each.
    """

    def __init__(self, path: str, node: Any, overrides: dict[str, str]) -> None:
        self.path = path
        self.node = node
        self.overrides = overrides
        self.twice: tuple[tuple[int, str], ...] = ()

    def refuse(self, mistakes: Iterable[Mistake]) -> None:
        """Raise one error with all of them and with the keys that are given twice, in the order of the file."""
        found = [
            (self._order(self._place(mistake)), f"{self._where(mistake)}: {mistake.text}".lstrip(": "), mistake.kind)
            for mistake in mistakes
        ]
        found += [((False, line), f"{self.path}:{line}: {text}", ConfigError) for line, text in self.twice]
        if found:
            kinds = {kind for _, _, kind in found}
            lines = dict.fromkeys(line for _, line, _ in sorted(found, key=lambda one: one[0]))
            raise (kinds.pop() if len(kinds) == 1 else ConfigError)("\n".join(lines))

    def has(self, key: str) -> bool:
        """Return whether the file or the command line gives a value to this key."""
        return self._override(key) is not None or _line(self.node, tuple(key.split(".")))[1]

    def _place(self, mistake: Mistake) -> Place:
        """The key that a text names, if it is given; else the place of the mistake."""
        for word in words_of(mistake.text) if mistake.names_key else ():
            parts = tuple(word.split("."))
            for depth in range(len(mistake.place), -1, -1):
                place = (*mistake.place[:depth], *parts)
                if len(place) > len(mistake.place) - 1 and self.has(dotted(place)):
                    return place
        return mistake.place

    def _order(self, place: Place) -> tuple[bool, int]:
        return self._override(dotted(place)) is not None, _line(self.node, place)[0]

    def _where(self, mistake: Mistake) -> str:
        if mistake.kind is DeviceError:  # of the command line
            return ""
        place = self._place(mistake)
        if (override := self._override(dotted(place))) is not None:
            below = f": {mistake.key}" if mistake.key.startswith(f"{override}.") else ""
            return _shown(override, self.overrides[override]) + below
        line = "" if self.node is None else f":{_line(self.node, place)[0]}"
        return f"{self.path}{line}: {mistake.key}".rstrip(": ")

    def _override(self, key: str) -> str | None:
        """The override that gave this key, or in whose key an unknown section is."""
        names = [name for name in self.overrides if f"{key}.".startswith(f"{name}.")]
        if not names and key and not _line(self.node, tuple(key.split(".")))[1]:
            names = [name for name in self.overrides if name.startswith(f"{key}.")]
        return names[-1] if names else None


def given_twice(node: Any) -> Iterator[tuple[int, str]]:
    """Yield the lines of keys of which YAML would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines and key.value != "<<":
                yield line, f"`{key.value}` is given twice, first in line {lines[key.value]}"
            lines.setdefault(str(key.value), line)
            yield from given_twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from given_twice(item)


def _shown(key: str, text: str) -> str:
    value = "..." if key.endswith(_SECRETS) else text.partition("=")[2]
    return f"--set {key}={value:.80}"


def _line(node: Any, place: Place) -> tuple[int, bool]:
    """The line, from 1, of the deepest part of `place` that the file has, and whether that is all of it."""
    line = 1
    for part in place:
        places = []
        if isinstance(node, yaml.MappingNode):
            places = [pair for pair in node.value if pair[0].value == str(part)]
        elif isinstance(node, yaml.SequenceNode) and str(part).isdecimal():
            places = [(item, item) for item in node.value[int(part) : int(part) + 1]]
        if not places:
            return line, False
        line, node = places[-1][0].start_mark.line + 1, places[-1][1]  # the last, which overrides what is merged in
    return line, True
