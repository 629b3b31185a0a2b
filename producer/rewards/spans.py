"""Rewards of parts of a completion, as a reward function returns them in place of a number.

Guarantee: spans that exist end one behind the other, within the completion, and have finite rewards; what is refused is named
with its place.

    {"tokens": [(end, reward), ...]}       `end`: number of tokens of `completion_ids` up to the end of the span
    {"characters": [(end, reward), ...]}   number of characters of the completion's text

A span begins where the one before it ends, the first with the completion.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import msgspec

FLOAT32_MAX = 3.4028234663852886e38
_Unit = Literal["tokens", "characters"]


class Spans(msgspec.Struct, frozen=True):
    """The spans of one completion."""

    unit: _Unit
    ends: list[int]
    rewards: list[float]

    @classmethod
    def of(cls, returned: dict[Any, Any], completion: Any, num_tokens: int) -> "Spans":
        """Check what a function returned for a completion of so many tokens. Raise ValueError if it is not of that form."""
        unit, pairs = next(iter(returned.items()), ("", None))
        if len(returned) != 1 or unit not in get_args(_Unit) or not isinstance(pairs, list | tuple) or not pairs:
            raise ValueError(f'is {returned!r:.80}; return {{"tokens": [(end, reward), ...]}}, or "characters"')
        ends, rewards = list[int](), list[float]()
        for place, pair in enumerate(pairs):
            end, reward = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
            if isinstance(end, bool) or not hasattr(type(end), "__index__"):
                raise ValueError(f"has span {place}: {pair!r:.80}; a span is (end, reward), and its end a whole number")
            ends.append(int(end))  # type: ignore[arg-type]
            rewards.append(finite(reward, f"has span {place}, whose reward"))
        for place, (begin, end) in enumerate(pairwise([0, *ends])):
            if end <= begin:
                raise ValueError(f"has span {place}, which ends at {end} and begins at {begin}")
        text = text_of(completion)
        if unit == "characters" and text is None:
            raise ValueError("has ends in characters, and the completion has several messages; give them in tokens")
        length = num_tokens if unit == "tokens" else len(text or "")
        if ends[-1] > length:
            raise ValueError(f"has a span that ends at {ends[-1]}, and the completion has {length} {unit}")
        return cls(unit, ends, rewards)  # type: ignore[arg-type]

    def in_tokens(self, completion: Any, ids: list[int], decode: Callable[[list[int]], str]) -> "Spans":
        """Return them with ends in tokens: a span ends with the token in which its last character ends. Raise ValueError if the
        completion is not the text of its tokens."""
        if self.unit == "tokens":
            return self
        text = text_of(completion)
        if text is None or decode(ids) != text:
            raise ValueError("has ends in characters of a text that is not that of its tokens; give them in tokens")
        return Spans("tokens", ends_in_tokens(text, self.ends, ids, decode), self.rewards)


_CONTEXT, _FAR = 8, 32  # tokens


class _Beginnings:
    """The texts of the first tokens of a completion. Each is decoded from a few tokens before the last place where the text was
    whole, so that it takes as long late in a text as early."""

    def __init__(self, text: str, ids: list[int], decode: Callable[[list[int]], str]) -> None:
        self._text, self._ids, self._decode = text, ids, decode
        self._tokens = self._characters = 0  # before the place
        self._context = ""  # the text of the last tokens before it
        self._shown: dict[int, str] = {}  # behind it, by the number of tokens

    def hold(self, num: int, end: int) -> bool:
        """Return whether the text of `num` tokens begins with all before `end`."""
        return self._behind(num).startswith(self._text[self._characters : end])

    def go_on_from(self, num: int) -> None:
        """Ask for no fewer tokens from here on."""
        if num - self._tokens < _FAR or not self._text.startswith(behind := self._behind(num), self._characters):
            return  # half a character
        self._tokens, self._characters = num, self._characters + len(behind)
        self._context, self._shown = self._decode(self._ids[num - _CONTEXT : num]), {}

    def _behind(self, num: int) -> str:
        if num not in self._shown:
            read = self._decode(self._ids[max(0, self._tokens - _CONTEXT) : num])
            is_whole = read.startswith(self._context)
            whole = read if is_whole else self._decode(self._ids[:num])
            self._shown[num] = whole[len(self._context) if is_whole else self._characters :]
        return self._shown[num]


def ends_in_tokens(text: str, ends: list[int], ids: list[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Return for each end in characters, in ascending order, the smallest number of tokens whose text begins with all before it.
    It takes hardly longer for many ends than for one."""
    beginnings = _Beginnings(text, ids, decode)
    found, place = list[int](), 0
    for end in ends:  # each is near the one before it
        step = 1
        while place + step < len(ids) and not beginnings.hold(place + step, end):
            step *= 2
        holds = partial(beginnings.hold, end=end)
        place = bisect_left(range(len(ids)), True, place, min(place + step, len(ids)), key=holds)
        beginnings.go_on_from(place)
        found.append(place)
    return found


def text_of(completion: Any) -> str | None:
    """Return the text of a completion; None for several messages, or one that has other content."""
    if isinstance(completion, list) and len(completion) == 1:
        completion = completion[0].get("content")
    return completion if isinstance(completion, str) else None


def finite(value: Any, what: str) -> float:
    """Return a number that float32 has. Raise ValueError for anything else."""
    try:
        number = float(value)
    except Exception as error:
        raise ValueError(f"{what} is {value!r:.80}: {error!s:.200}") from None
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{what} is {number}; return a finite number")
    return number
