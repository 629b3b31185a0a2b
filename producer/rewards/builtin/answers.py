"""Rewards that compare the text of a completion: `exact_match`, `numeric_match`, `format_regex`.

Guarantee: they are pure functions of text and answer. A pattern that backtracks without end costs its completion `time_s` and
no more.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from producer.rewards.builtin.texts import Results, each, with_answers, within
from protocol.config.sections.builtin_rewards import ExactMatch, FormatRegex, NumericMatch

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def exact_match(options: ExactMatch) -> Callable[..., Results]:
    find = _finder(options.pattern, options.time_s)

    def plain(text: str) -> str:
        return text.strip().casefold() if options.ignore_case else text.strip()

    def score(text: str, answer: Any) -> float:
        found = find(text)
        return float(found is not None and plain(found) == plain(str(answer)))

    return with_answers(options.column, score)


def numeric_match(options: NumericMatch) -> Callable[..., Results]:
    find = _finder(options.pattern, options.time_s)

    def score(text: str, answer: Any) -> float:
        right = last_number(str(answer))
        if right is None:
            raise ValueError(f"column {options.column!r} has no number: {answer!r:.80}")
        found = find(text)
        number = None if found is None else last_number(found)
        tolerance = options.tolerance
        return float(number is not None and math.isclose(number, right, rel_tol=tolerance, abs_tol=tolerance))

    return with_answers(options.column, score)


def format_regex(options: FormatRegex) -> Callable[..., Results]:
    pattern = re.compile(options.pattern, re.DOTALL)
    matches = pattern.fullmatch if options.whole else pattern.search

    def score(_index: int, text: str) -> float:
        with within(options.time_s, "the pattern"):
            return float(matches(text) is not None)

    return lambda completions, **_columns: each(completions, score)


def last_number(text: str) -> float | None:
    """The last number of a text: 1250.5 in "it costs $1,250.50."; a sign belongs to it unless it is an operator ("5-3")."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match
    if found is None:
        return None
    number = found[0]
    if (
        number[0] in "+-"
        and found.start() > 0
        and (text[found.start() - 1].isalnum() or text[found.start() - 1] in ")]}")
    ):
        number = number[1:]
    return float(number.replace(",", ""))


def _finder(pattern: str | None, limit_s: float) -> Callable[[str], str | None]:
    """Returns a function that finds the last match, or takes the whole text where there is no pattern."""
    if pattern is None:
        return lambda text: text
    compiled = re.compile(pattern, re.DOTALL)

    def find(text: str) -> str | None:
        found = None
        with within(limit_s, "the pattern"):
            for match in compiled.finditer(text):
                found = match
        return None if found is None else found[found.re.groups and 1] or ""

    return find
