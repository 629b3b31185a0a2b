"""The calls that this engine sampled and that may be trained, until they are scored.

Guarantee: a token that is found here was sampled by this engine behind exactly the tokens before it, with the sampling of the
run, and has the log-prob and the policy version of its sampling. A removed call is not found again. The records are bounded in
bytes and in time; the oldest is evicted first.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from slipstream_extras.endpoint.openai import Sampled

_MAX_BYTES = 256 * 2**20
_KEEP_S = 3600.0
_OVERHEAD_BYTES = 1024  # of a call, for Python objects beside its tokens


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A recorded completion. C sampled tokens: `token_ids` int32, `logprobs` float32, `versions` int32, each (C,)."""

    prompt: bytes  # int32
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    truncated: bool
    at: float  # seconds of the clock

    @property
    def prompt_length(self) -> int:
        return len(self.prompt) // 4

    @property
    def num_bytes(self) -> int:
        return len(self.prompt) + 12 * len(self.token_ids) + _OVERHEAD_BYTES


@dataclass(frozen=True)
class Span:
    """The tokens from `start` to `end` of a sequence are the first ones that `call` sampled."""

    start: int
    end: int
    call: RecordedCall


@dataclass
class RecordedCalls:
    """Keeps at most `max_bytes` of calls, each for `keep_s` seconds."""

    max_bytes: int = _MAX_BYTES
    keep_s: float = _KEEP_S
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    evicted: int = 0  # calls that had to make room
    _calls: dict[RecordedCall, None] = field(default_factory=dict)  # the oldest first
    _by_prompt: defaultdict[tuple[int, int], list[RecordedCall]] = field(default_factory=partial(defaultdict, list))
    _lengths: Counter[int] = field(default_factory=Counter)  # of prompts

    def __len__(self) -> int:
        return len(self._calls)

    def note(self, sampled: Sampled) -> None:
        if not sampled.token_ids or not sampled.prompt_ids:
            return
        call = RecordedCall(
            np.array(sampled.prompt_ids, "<i4").tobytes(),
            np.array(sampled.token_ids, "<i4"),
            np.array(sampled.logprobs, "<f4"),
            np.array(sampled.token_versions, "<i4"),
            sampled.finish_reason == "length",
            self.clock(),
        )
        self._calls[call] = None
        self._by_prompt[_key(call)].append(call)
        self._lengths[call.prompt_length] += 1
        self.num_bytes += call.num_bytes
        self._make_room()

    def find(self, token_ids: NDArray[np.int32], taken: set[RecordedCall]) -> list[Span]:
        """Return the sampled parts of a sequence (int32, (T,)), as ordered spans that do not overlap.

        Among calls with the same prompt, choose the call that has most tokens in common with the sequence, then the shortest, so
        that a longer call remains for a sequence that continues like it, then the newest. Calls in `taken` are not used.
        """
        self._make_room()
        data, spans = token_ids.tobytes(), list[Span]()
        check, before = 0, 0
        for length in sorted(length for length in self._lengths if length < len(token_ids)):
            check, before = crc32(data[4 * before : 4 * length], check), length
            best: Span | None = None
            for call in reversed(self._by_prompt.get((length, check), ())):
                if call in taken or call.prompt != data[: 4 * length]:
                    continue
                span = Span(length, length + _common_length(call.token_ids, token_ids[length:]), call)
                if span.end > length and (best is None or _fit(span) > _fit(best)):
                    best = span
            if best is not None:
                if spans and spans[-1].end > length:  # the next prompt ends in the middle of this answer
                    spans[-1] = Span(spans[-1].start, length, spans[-1].call)
                spans.append(best)
        return spans

    def remove(self, calls: Iterable[RecordedCall]) -> None:
        for call in calls:
            if call in self._calls:
                self._remove(call)

    def forget(self) -> None:
        self.remove(list(self._calls))

    def _make_room(self) -> None:
        oldest_kept = self.clock() - self.keep_s
        while self._calls:
            call = next(iter(self._calls))
            if self.num_bytes > self.max_bytes:
                self.evicted += 1
            elif call.at >= oldest_kept:
                return
            self._remove(call)

    def _remove(self, call: RecordedCall) -> None:
        del self._calls[call]
        self.num_bytes -= call.num_bytes
        key = _key(call)
        self._by_prompt[key].remove(call)
        if not self._by_prompt[key]:
            del self._by_prompt[key]
        self._lengths[call.prompt_length] -= 1
        if not self._lengths[call.prompt_length]:
            del self._lengths[call.prompt_length]


def _key(call: RecordedCall) -> tuple[int, int]:
    return call.prompt_length, crc32(call.prompt)


def _fit(span: Span) -> tuple[int, int]:
    return span.end, -len(span.call.token_ids)


def _common_length(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
