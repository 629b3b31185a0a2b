"""Rewards that come with Slipstream. Each maker here is an entry point of the group `slipstream.rewards`.

Guarantee: a maker returns a function with TRL's signature, or raises an exception that names what is missing. The function's
list has an exception for a completion that it cannot score, so that the reward of that completion alone is missing. Rewards of
texts are pure functions of text and answer. Rewards of lengths count the sampled token ids and never tokenize text again. A
pattern that backtracks without end costs its completion `time_s` and no more; math-verify interrupts itself. Both use SIGALRM,
which a worker's main thread allows.
"""

import json
import math
import re
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from protocol.config.reward_options import (
    ExactMatch,
    FormatRegex,
    LengthPenalty,
    MathVerify,
    NumericMatch,
    ReasoningGym,
    ReasoningLength,
)
from protocol.errors import ConfigError
from protocol.wire.answers import right_answers

Results = list[float | Exception | None]
_AGAIN_S = 0.1
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def exact_match(**given: Any) -> Callable[..., Results]:
    options = ExactMatch(**given)
    find = _finder(options.pattern, options.time_s)

    def plain(text: str) -> str:
        return text.strip().casefold() if options.ignore_case else text.strip()

    def score(text: str, answers: list[str]) -> float:
        found = find(text)
        return float(found is not None and plain(found) in map(plain, answers))

    return _with_answers(options.column, score)


def numeric_match(**given: Any) -> Callable[..., Results]:
    options = NumericMatch(**given)
    find, tolerance = _finder(options.pattern, options.time_s), options.tolerance

    def is_right(number: float, answer: str) -> bool:
        right = last_number(answer)
        if right is None:
            raise ValueError(f"column {options.column!r} has no number: {answer!r:.80}")
        return math.isclose(number, right, rel_tol=tolerance, abs_tol=tolerance)

    def score(text: str, answers: list[str]) -> float:
        number = last_number(find(text) or "")
        compared = [is_right(math.nan if number is None else number, answer) for answer in answers]
        return float(any(compared))

    return _with_answers(options.column, score)


def format_regex(**given: Any) -> Callable[..., Results]:
    options = FormatRegex(**given)
    pattern = re.compile(options.pattern, re.DOTALL)
    matches = pattern.fullmatch if options.whole else pattern.search

    def score(text: str) -> float:
        with _within(options.time_s):
            return float(matches(text) is not None)

    return lambda completions, **_columns: _each(score, completions)


def _lacks(name: str, package: str, extra: str, error: ImportError) -> ConfigError:
    """The error for a reward whose package is not installed."""
    return ConfigError(
        f"rewards.functions: {name} needs the package {package} ({error}); install it in Slipstream's checkout: "
        f"pip install '.[{extra}]'"
    )


def math_verify(**given: Any) -> Callable[..., Results]:
    options = MathVerify(**given)
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise _lacks("math_verify", "math-verify", "math", error) from error
    limit = {"parsing_timeout": options.time_s, "raise_on_error": True}

    def meant(answer: str) -> Any:
        right = parse(answer, **limit) or parse(f"${answer}$", **limit)  # bare LaTeX is found between dollar signs
        if not right:
            raise ValueError(f"column {options.column!r} has no mathematics: {answer!r:.80}")
        return right

    def score(text: str, answers: list[str]) -> float:
        rights, said = [meant(answer) for answer in answers], parse(text, **limit)
        within = {"timeout_seconds": options.time_s, "raise_on_error": True}
        return float(any(verify(right, said, **within) for right in rights))

    return _with_answers(options.column, score)


def reasoning_gym(**given: Any) -> Callable[..., Results]:
    options = ReasoningGym(**given)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise _lacks("reasoning_gym", "reasoning-gym", "reasoning", error) from error

    @lru_cache(_MOST_SETS)
    def made(name: str, config: str) -> Callable[[str, Any], float]:
        return create_dataset(name, **json.loads(config)).score_answer  # type: ignore[no-any-return]

    def score(text: str, encoded: Any) -> float:
        entry = json.loads(encoded)
        name = entry["metadata"].get("source_dataset")
        if name not in DATASETS:
            raise ValueError(f"reasoning-gym has no data set {name!r}")
        answer = last_answer(text, options.tag)
        if not answer:
            return 0.0
        if name in _WITH_TUPLES:
            entry["metadata"] = _with_tuples(entry["metadata"])
        try:
            if name in _COMPARED:
                return float(answer.casefold() == str(entry["answer"]).casefold())
            scorer = made(name, json.dumps(entry.get("config", {}), sort_keys=True))
            with _within(options.time_s):
                found = float(scorer(answer, entry))
        except Exception:  # its scorers raise on some answers that are none
            return 0.0
        return min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0

    return lambda completions, **columns: _each(score, completions, column_of(columns, options.column))


_MOST_SETS = 256
_WITH_TUPLES = ("arc_agi", "rearc")  # they compare with tuples, and JSON has none
_COMPARED = ("game_of_life_halting",)  # it takes every text for the right one


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def last_answer(text: str, tag: str) -> str | None:
    """Return what stands in the last tag or `\\boxed{}` of a text, whichever begins later; None if neither is there, or it is
    not closed."""
    begin, end = f"<{tag}>", f"</{tag}>"
    tagged, boxed = text.rfind(begin), text.rfind("\\boxed{")
    if tagged > boxed:
        inside, found, _ = text[tagged + len(begin) :].partition(end)
        return inside.strip() if found else None
    depth = 0
    for place in range(boxed + len("\\boxed"), len(text)) if boxed >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[boxed + len("\\boxed{") : place].strip()
    return None


def length_penalty(**given: Any) -> Callable[..., list[float]]:
    options = LengthPenalty(**given)
    return lambda completion_ids, **_columns: [_penalty(options, len(ids)) for ids in completion_ids]


def reasoning_length(**given: Any) -> Callable[..., list[float]]:
    options = ReasoningLength(**given)
    return lambda reasoning_tokens, **_columns: [_penalty(options, count) for count in reasoning_tokens]


def _penalty(options: LengthPenalty, num_tokens: int) -> float:
    return -min(options.at_most, options.per_token * max(0, num_tokens - options.free_tokens))


def _with_answers(column: str, score: Callable[[str, list[str]], float]) -> Callable[..., Results]:
    """Return the reward by `score` of a text and all right answers."""

    def score_one(text: str, answer: Any) -> float:
        return score(text, right_answers(answer, column))

    return lambda completions, **columns: _each(score_one, completions, column_of(columns, column))


def last_number(text: str) -> float | None:
    """Return the last number of a text: 1250.5 in "it costs $1,250.50.". Its sign counts unless it is an operator ("5-3")."""
    found = _last(_NUMBER, text)
    if found is None:
        return None
    before = text[: found.start()][-1:]
    is_operator = before.isalnum() or before in (")", "]", "}")
    return float((found[0].lstrip("+-") if is_operator else found[0]).replace(",", ""))


def _finder(pattern: str | None, limit_s: float) -> Callable[[str], str | None]:
    """Return a function that finds the last match, or returns the whole text if there is no pattern."""
    if pattern is None:
        return lambda text: text
    compiled = re.compile(pattern, re.DOTALL)

    def find(text: str) -> str | None:
        with _within(limit_s):
            found = _last(compiled, text)
        return None if found is None else found[compiled.groups and 1] or ""

    return find


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def text_of(completion: Any) -> str:
    """Return the completion itself if it is a text, else the content of its last assistant message."""
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") for message in completion if message.get("role") == "assistant"]
    last = contents[-1] if contents else ""
    if isinstance(last, list):  # content in parts
        return "".join(part.get("text", "") for part in last)
    return last or ""


def column_of(columns: dict[str, Any], name: str) -> list[Any]:
    """Return the column's values, one per completion. Raise KeyError if the dataset has no such column."""
    if name not in columns:
        known = ", ".join(sorted(key for key in columns if key not in ("prompts", "completions", "completion_ids")))
        raise KeyError(f"the dataset has no column {name!r}; set options.column to one of: {known}")
    values: list[Any] = columns[name]
    return values


def _each(score: Callable[..., float], completions: list[Any], *columns: list[Any]) -> Results:
    """Score the text of every completion with its values. The result of a completion that raised is its exception."""
    results: Results = []
    for completion, *values in zip(completions, *columns, strict=True):
        try:
            results.append(score(text_of(completion), *values))
        except Exception as error:
            results.append(error)
    return results


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the time of a pattern is over."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the pattern took more than {limit_s:g} seconds")

    before = signal.signal(signal.SIGALRM, over)  # pure Python and `re` check for signals while they work
    # A finalizer, or code that catches everything, may take the first exception.
    signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
