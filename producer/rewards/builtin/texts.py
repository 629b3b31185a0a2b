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
    """The column's values, one per completion. Raises KeyError if the dataset has no such column."""
    if name not in columns:
        there = ", ".join(sorted(key for key in columns if key not in ("prompts", "completions", "completion_ids")))
        raise KeyError(f"the dataset has no column {name!r}; set options.column to one of: {there}")
    values: list[Any] = columns[name]
    return values


def each(score: Callable[..., float], completions: list[Any], *columns: list[Any]) -> Results:
    """Scores the text of every completion with its values. The result of a completion that raised is its exception."""
    results: Results = []
    for completion, *values in zip(completions, *columns, strict=True):
        try:
            results.append(score(text_of(completion), *values))
        except Exception as error:
            results.append(error)
    return results


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Raises TimeoutError in the block when the time of a pattern is over."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the pattern took more than {limit_s:g} seconds")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
