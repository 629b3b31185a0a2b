"""What the shipped rewards have in common: the text of a completion, a dataset column, a limit in time.

Guarantee: a limit holds for pure Python and for `re`, which look for signals while they work; it needs the main thread.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Results = list[float | Exception | None]


def text_of(completion: Any) -> str:
    """The completion itself if it is a text, else the content of its last assistant message."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    last = said[-1] if said else ""
    if isinstance(last, list):  # content in parts
        return "".join(part.get("text", "") for part in last)
    return last or ""


def column_of(columns: dict[str, Any], name: str) -> list[Any]:
    """The column's values, one per completion.

    Raises:
        KeyError: the dataset has no such column.
    """
    if name not in columns:
        there = ", ".join(sorted(key for key in columns if key not in ("prompts", "completions", "completion_ids")))
        raise KeyError(f"the dataset has no column {name!r}; set options.column to one of: {there}")
    values: list[Any] = columns[name]
    return values


def each(completions: list[Any], score: Callable[[int, str], float]) -> Results:
    """Scores the text of every completion. The result of a completion that raised is its exception."""
    results: Results = []
    for index, completion in enumerate(completions):
        try:
            results.append(score(index, text_of(completion)))
        except KeyError:  # a missing column concerns all of them
            raise
        except Exception as error:
            results.append(error)
    return results


def with_answers(column: str, score: Callable[[str, Any], float]) -> Callable[..., Results]:
    """A reward that scores the text of every completion by the column's value for it."""

    def score_all(completions: list[Any], **columns: Any) -> Results:
        answers = column_of(columns, column)
        return each(completions, lambda index, text: score(text, answers[index]))

    return score_all


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """Raises TimeoutError in the block when the time is over."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} took more than {limit_s:g} seconds")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
