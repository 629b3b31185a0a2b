"""The cost of the streams `credit`, `teacher_logprobs` and `teacher_top_*` on the wire: `python -m benchmarks.streams`.

Prints, for a group of 8 completions of 512 tokens without them and with each (a span in every 64 tokens), the bytes of its
frame, and the microseconds in which it is encoded, and decoded and checked: the medians of `ROUNDS` groups.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.groups import SHAPE, GroupFactory
from protocol.wire.codec import encode
from protocol.wire.messages import Group

ROUNDS = 2000


def microseconds(work: Callable[[], Any]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - began)
    return median(times) / 1000


def rewarded(group: Group, every: int) -> Group:
    """Return the group with a reward at every token of this distance."""
    ends = np.arange(SHAPE.num_generations * SHAPE.max_completion_length) % every == every - 1
    credit = np.where(ends, 0.5, 0.0).astype("<f4")
    return msgspec.structs.replace(group, credit=credit.tobytes(), span_ends=ends.tobytes())


def top(group: Group, k: int) -> dict[str, bytes]:
    """Return the fields of a teacher: likeliest tokens, other ones in each place, of probabilities 1/4, 1/8 and so on at most."""
    draw, num_tokens = np.random.default_rng(0), SHAPE.num_generations * SHAPE.max_completion_length
    ids = draw.integers(0, SHAPE.vocab_size - k, num_tokens)[:, None] + np.arange(k)
    logprobs = np.log(0.25) + np.log(0.5) * np.arange(k) + draw.uniform(-0.5, 0, (num_tokens, k))
    own = np.frombuffer(group.logprobs, "<f4") - 1
    fields = {"teacher_logprobs": own.astype("<f4").tobytes(), "teacher_top_ids": ids.astype("<i4").tobytes()}
    return fields | {"teacher_top_logprobs": logprobs.astype("<f4").tobytes()}


def main() -> None:
    group = GroupFactory(0).group("0-0-0-1-s", 0)
    taught = msgspec.structs.replace(group, teacher_logprobs=group.logprobs)
    likeliest = msgspec.structs.replace(group, **top(group, 16))
    for name, one in (
        ("without", group), ("with credit", rewarded(group, 64)), ("with teacher", taught), ("with top 16", likeliest)
    ):  # fmt: skip
        frame = encode(one)
        encoding, loading = microseconds(partial(encode, one)), microseconds(partial(SHAPE.load, frame))
        print(f"{name:<12}{len(frame):>8} bytes  encode {encoding:6.1f} us  decode and check {loading:6.1f} us")


if __name__ == "__main__":
    main()
