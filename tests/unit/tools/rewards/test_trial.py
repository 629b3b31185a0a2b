"""Completions of a trial end where those of the run would."""

from types import SimpleNamespace
from typing import Any

import pytest

from tools.rewards.trial import until_stop

LETTERS: Any = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("a b c", [], "a b c"),
        ("a</x>b</x>", ["</x>"], "a</x>"),
        ("a</x>b", ["b", "</x>"], "a</x>"),
        ("</x>", ["</x>"], "</x>"),
        ("ab", ["c"], "ab"),
        ("", ["c"], ""),
    ],
)
def test_a_completion_keeps_the_first_text_that_ends_it(text: str, stop: list[str], kept: str) -> None:
    assert LETTERS.decode(until_stop([ord(letter) for letter in text], stop, LETTERS)) == kept
