"""The filters of a list of groups, as they stand in a URL.

Guarantee: every list has one complete URL; a value that makes no sense is refused with the name of its field.
"""

import math
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlencode

from replay.journal.schema import STATES
from replay.sources import ONE, Sources
from slipstream_extras.view.index.listing import SORTS, Cursor, Sort, Wanted
from slipstream_extras.view.index.rows import VERDICTS

FIELDS = (
    "q", "state", "verdict", "step", "version", "reward", "tokens", "length", "prompt", "source", "producer", "replayed",
    "truncated", "sort", "order",
)  # fmt: skip
_MOST = 2**62
_MAX_CHARS = 200


class FormError(ValueError):
    """A field of a request that makes no sense."""


def wanted_of(query: Mapping[str, str], sources: Sources = ONE) -> Wanted:
    """The list that a URL names, or `FormError`."""
    least_prompt, most_prompt = sources.range_of(_choice(query, "source", sources.names) or "") or (None, None)
    least_step, most_step = _whole_range(query, "step")
    least_version, most_version = _whole_range(query, "version")
    least_tokens, most_tokens = _whole_range(query, "tokens")
    least_length, most_length = _whole_range(query, "length")
    least_reward, most_reward = _range(query, "reward")
    return Wanted(
        state=_choice(query, "state", STATES),
        verdict=_choice(query, "verdict", VERDICTS),
        producer=_text(query, "producer") or None,
        prompt=_whole(query, "prompt"),
        least_prompt=least_prompt,
        most_prompt=most_prompt,
        least_step=least_step,
        most_step=most_step,
        least_version=least_version,
        most_version=most_version,
        least_reward=least_reward,
        most_reward=most_reward,
        least_tokens=least_tokens,
        most_tokens=most_tokens,
        least_length=least_length,
        most_length=most_length,
        replayed=_yes_or_no(query, "replayed"),
        truncated=_yes_or_no(query, "truncated"),
        text=_text(query, "q"),
        sort=cast(Sort, _choice(query, "sort", SORTS) or "arrival"),
        ascending=_choice(query, "order", ("ascending", "descending")) == "ascending",
    )


def cursor_of(query: Mapping[str, str]) -> Cursor | None:
    """Return where the page begins: `at=VALUE,SEQ`, with `back=1` for the page before it."""
    if not (text := query.get("at", "")):
        return None
    value, _, seq = text.partition(",")
    try:
        found = Cursor(float(value), int(seq), query.get("back") == "1")
    except ValueError:
        found = None
    if found is None or not math.isfinite(found.value) or not 0 <= found.seq < _MOST:
        raise FormError(f"at: expected the value of a list's link (got {text[:40]!r})")
    return found


def with_cursor(fields: dict[str, str], cursor: Cursor | None) -> str | None:
    """The query of the page that begins there."""
    if cursor is None:
        return None
    return urlencode(fields | {"at": f"{cursor.value!r},{cursor.seq}"} | ({"back": "1"} if cursor.back else {}))


def list_fields(query: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that make the list, as they were given."""
    return {name: query[name] for name in FIELDS if query.get(name)}


def whole(query: Mapping[str, str], name: str) -> int | None:
    """A number that a URL has under this name; `FormError` if it is none."""
    return _whole(query, name)


def choice(query: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    """Return one of these words; None if the URL has none; `FormError` for another."""
    return _choice(query, name, choices)


def versions(query: Mapping[str, str], name: str) -> tuple[int, int] | None:
    """A range of policy versions, both included."""
    low, high = _whole_range(query, name)
    return None if low is None and high is None else (low or 0, _MOST if high is None else high)


def _text(query: Mapping[str, str], name: str) -> str:
    text = query.get(name, "").strip()
    if len(text) > _MAX_CHARS or "\0" in text:
        raise FormError(f"{name}: at most {_MAX_CHARS} characters")
    return text


def _choice(query: Mapping[str, str], name: str, choices: tuple[str, ...]) -> "str | None":
    text = _text(query, name)
    if text and text not in choices:
        raise FormError(f"{name}: expected one of {', '.join(choices)} (got {text[:40]!r})")
    return text or None


def _yes_or_no(query: Mapping[str, str], name: str) -> bool | None:
    text = _choice(query, name, ("yes", "no"))
    return None if text is None else text == "yes"


def _whole(query: Mapping[str, str], name: str) -> int | None:
    text = _text(query, name)
    return _number(name, text, whole=True) if text else None  # type: ignore[return-value]


def _whole_range(query: Mapping[str, str], name: str) -> tuple[int | None, int | None]:
    return _range(query, name, whole=True)  # type: ignore[return-value]


def _range(query: Mapping[str, str], name: str, *, whole: bool = False) -> tuple[float | None, float | None]:
    """`N`, `N:M`, `N:` or `:M`."""
    text = _text(query, name)
    first, colon, last = text.partition(":")
    low = _number(name, first, whole=whole) if first else None
    high = (_number(name, last, whole=whole) if last else None) if colon else low
    if low is not None and high is not None and low > high:
        raise FormError(f"{name}: {text} is empty, the larger number comes last")
    return low, high


def _number(name: str, text: str, *, whole: bool) -> float:
    try:
        found: float = int(text) if whole else float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or abs(found) >= _MOST:
        kind = "a whole number" if whole else "a number"
        raise FormError(f"{name}: expected {kind}, or two such as 3:7 (got {text[:40]!r})")
    return found
