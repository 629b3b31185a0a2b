"""Repetitive texts of a model cost a time that grows as their length: no pattern backtracks, no text is copied by part."""

import time
from collections.abc import Callable

import pytest

from producer.rewards.builtin import last_answer, last_number
from producer.rewards.thinking import segments
from slipstream_extras.judge.code import program_of
from slipstream_extras.view.pages.group import plain, turns

READERS: dict[str, Callable[[str], object]] = {
    "program_of": program_of,
    "last_answer": lambda text: last_answer(text, "answer"),
    "last_number": last_number,
    "segments": lambda text: segments(text, "<think>", "</think>", opened=False),
    "segments that began": lambda text: segments(text, "<think>", "</think>", opened=True),
    "turns": lambda text: turns(plain(text)),
}
BEGINNINGS = ("", "```", "<answer>", "\\boxed{", "1")
PIECES = (" ", "\t", "\n", "```", "``` ", "```python ", "{", "}", "\\boxed{", "<answer>", "</answer>", "<think>", "</think>",
          "<think></think>", "1", "1,", "1,111", "1e", ".1", "-", "<|im_start|>user\n", "<|im_end|>", "<")  # fmt: skip
LENGTH, SHORTEST_S = 20_000, 0.05


def spent_s(reader: Callable[[str], object], text: str) -> float:
    began = time.thread_time()  # of the processor: a busy machine changes little
    reader(text)
    return time.thread_time() - began


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_four_times_as_much_takes_hardly_more_than_four_times_as_long(name: str) -> None:
    reader, slow = READERS[name], []
    for beginning in BEGINNINGS:
        for piece in PIECES:
            once = beginning + piece * (LENGTH // len(piece))
            long_s = spent_s(reader, once + once[len(beginning) :] * 3)
            if long_s > SHORTEST_S and long_s > 9 * min(
                spent_s(reader, once) for _ in range(3)
            ):  # 16 if it grew as the square
                slow.append((beginning, piece, long_s))
    assert slow == []
