"""YAML's own errors in plain words, with the line of the mistake.

Guarantee: the line is the one to be changed, which is often before the one where YAML noticed. What has no words of ours here
keeps YAML's, with the line where it noticed.
"""

import re
from typing import Any, NamedTuple

import yaml

_KEY = r"^\s*(?:- )*([\w.\"'-]+):"
_QUOTED = re.compile(r"""(?:^|[:,\[{-])\s*("(?:[^"\\]|\\.)*$|'(?:[^']|'')*$)""")
_STARTS = {
    "%": "put it in quotes",
    "@": "put it in quotes",
    "`": "put it in quotes",
    "*": "it names an anchor; for a text put it in quotes",
    "&": "it makes an anchor; for a text put it in quotes",
    "!": "it makes a tag; for a text put it in quotes",
}


class Fault(NamedTuple):
    """A mistake of YAML. `line` counts from 1; None: unknown."""

    line: int | None
    text: str


def fault_of(text: str, error: Exception) -> Fault:
    """Return what is wrong with a text that PyYAML refused."""
    if isinstance(error, RecursionError):
        return Fault(None, "it is nested too deeply")
    if not isinstance(error, yaml.MarkedYAMLError):
        return _of_value(text, error)
    lines = text.splitlines() or [""]
    problem, mark = str(error.problem or ""), error.problem_mark or error.context_mark
    at = min(mark.line if mark is not None else 0, len(lines) - 1)
    began = min(error.context_mark.line, len(lines) - 1) if error.context_mark is not None else at
    column = mark.column if mark is not None else 0
    number, words = (
        _of_tabs(lines, at, problem)
        or _of_starts(lines, at, column, problem)
        or _of_quotes(lines, at, began, problem)
        or _of_colons(lines, at, began, problem)
        or _of_brackets(lines, began, str(error.context or ""), problem)
        or _of_others(lines, at, column, problem)
        or (at, problem)
    )
    return Fault(number + 1, words)


Found = tuple[int, str] | None


def _of_tabs(lines: list[str], at: int, problem: str) -> Found:
    for number in (at, at - 1):
        if number >= 0 and re.match(r"^ *\t", lines[number]) and "expected" not in problem.partition("found")[0]:
            return number, "a tab at the start of the line; YAML takes spaces only"
    return None


def _of_starts(lines: list[str], at: int, column: int, problem: str) -> Found:
    if not re.search(
        r"cannot start any token|alphabetic or numeric|undefined alias|directive|tag|document start", problem
    ):
        return None
    sign = re.search(r"(?:^|[:,\[{-])\s*([%@`*&!])", lines[at])
    start = sign[1] if sign else lines[at][column : column + 1]
    return (at, f"a value begins with `{start}`: {_STARTS[start]}") if start in _STARTS else None


def _of_quotes(lines: list[str], at: int, began: int, problem: str) -> Found:
    if "escape" in problem:
        return at, "in double quotes `\\` begins an escape; use single quotes, or `\\\\`"
    for number in range(min(began, at), at + 1):
        if (open_quote := _QUOTED.search(lines[number])) is not None:
            return number, f"the quote `{open_quote[1][0]}` is not closed in its line"
    if re.search(r"[\"']\s*[^\s,:#\]}\"']", re.sub(r"^[^\"']*[\"']", "", lines[at])) and "expected key" in problem:
        return at, "there is text behind a closing quote; put the whole value in quotes"
    return None


def _of_colons(lines: list[str], at: int, began: int, problem: str) -> Found:
    if not re.search(
        r"mapping values are not allowed|expected ':'|expected key|block end|'-' indicator|document start", problem
    ):
        return None
    line, before = lines[at], _before(lines, at)
    for number in dict.fromkeys((began, at, before) if "':'" in problem else (before, at)):
        without = re.match(_KEY + r"[^\s:/]", lines[number])
        if without and not re.match(_KEY + r"\s", lines[number]):
            return number, f"a space is missing after `{without[1]}:`"
        if dash := re.match(r"^\s*-(?=[\w\"'])", lines[number]):
            return number, f"a space is missing after `{dash[0].strip()}`"
    if "':'" in problem:
        return began, "a colon is missing; a line is `key: value`"
    if re.match(_KEY + r"\s+[^\s\"'\[{|>#].*:(\s|$)", line) and "mapping values" in problem:
        return at, "a colon inside of a value: put the value in quotes"
    if "mapping values" in problem and not re.search(r":(\s|$)|^\s*- ", lines[before]):
        return before, "a colon is missing; a line is `key: value`"
    if _indent(line) > _indent(lines[before]):
        return at, "it is indented more than the line above, which has a value already"
    return at, "its indentation fits none of the lines above"


def _of_brackets(lines: list[str], began: int, context: str, problem: str) -> Found:
    kind = re.search(r"flow (sequence|mapping)", context)
    if kind is None and "node content" in problem:
        opened = next((number for number in range(began, -1, -1) if re.search(r"[\[{]", lines[number])), None)
        if opened is None:
            return began, "a bracket is closed here that was not opened"
        return opened, "a bracket is not closed"
    if kind is None or "expected" not in problem:
        return None
    sign = "[" if kind[1] == "sequence" else "{"
    return began, f"a `{sign}` is not closed, or a comma is missing behind it"


def _of_others(lines: list[str], at: int, column: int, problem: str) -> Found:
    if "single document" in problem or "another document" in problem:
        return at, "a second document begins here (`---`), and a file has one"
    if "unhashable" in problem or "complex" in problem:
        return at, "a key must be a text, and here it is a list or a mapping"
    if "recursive" in problem:
        return at, "a value contains itself"
    return None


def _of_value(text: str, error: Exception) -> Fault:
    for sign, pattern in (("!!", r"!!\w+"), ("", r"\b\d{4}-\d{1,2}-\d{1,2}\b")):
        if (value := re.search(pattern, text)) and sign in text:
            said = (
                f"a value does not fit its tag `{value[0]}`"
                if sign
                else f"{value[0]} is no date; for a text put it in quotes"
            )
            return Fault(text.count("\n", 0, value.start()) + 1, said)
    return Fault(None, str(error))


def _before(lines: list[str], at: int) -> int:
    return next((number for number in range(at - 1, -1, -1) if re.search(r"^\s*[^\s#]", lines[number])), at)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def in_words(place: str, text: str, error: Exception) -> str:
    """Return the message for a text of `place` that PyYAML refused."""
    fault: Any = fault_of(text, error)
    line = "" if fault.line is None else f":{fault.line}"
    return f"{place}{line}: not valid YAML: {fault.text}"
