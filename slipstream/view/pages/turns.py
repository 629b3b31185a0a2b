"""A text with the marks of a chat template, as the turns that it means.

Guarantee: pure; nothing but marks is left out, and a text without any is one turn. A mark that a model wrote by itself is
treated like one of the template: the raw text is one key away.
"""

import re
from typing import NamedTuple

from slipstream.view.pages.spans import Span

_MARKS = re.compile(
    r"<\|im_start\|>(?P<chatml>\w{1,32})\n|<\|start_header_id\|>(?P<llama>\w{1,32})<\|end_header_id\|>\n{0,2}"
    r"|<start_of_turn>(?P<gemma>\w{1,32})\n|<(?P<part>think|tool_call|tool_response)>\n?"
    r"|(?P<part_end></(?:think|tool_call|tool_response)>\n{0,2})|(?P<end><\|im_end\|>\n?|<\|eot_id\|>|<end_of_turn>\n?)"
)
_PARTS = {"think": "thinking", "tool_call": "tool call", "tool_response": "tool result"}


class Turn(NamedTuple):
    role: str  # "" where nothing says whose it is
    spans: list[Span]


def turns(found: list[Span], first_role: str = "") -> list[Turn]:
    """The turns of a text, whose first one is of `first_role`."""
    text = "".join(span.text for span in found)
    result: list[Turn] = []
    role = whose = first_role
    rest = _Rest(found)
    for mark in _MARKS.finditer(text):
        result.append(Turn(role, rest.up_to(mark.start())))
        rest.up_to(mark.end())
        speaker = mark["chatml"] or mark["llama"] or mark["gemma"]
        if speaker:
            role = whose = speaker
        elif mark["part"]:
            role = _PARTS[mark["part"]]
        else:
            role = whose if mark["part_end"] else ""
    result.append(Turn(role, rest.up_to(len(text))))
    return [turn for turn in result if any(span.text.strip() for span in turn.spans)]


class _Rest:
    """The spans that are not taken yet."""

    def __init__(self, found: list[Span]) -> None:
        self._spans = found[::-1]
        self._at = 0

    def up_to(self, end: int) -> list[Span]:
        taken = []
        while self._spans and self._at < end:
            span = self._spans.pop()
            size = end - self._at
            if len(span.text) > size:
                self._spans.append(span._replace(text=span.text[size:]))
                span = span._replace(text=span.text[:size])
            self._at += len(span.text)
            taken.append(span)
        return taken
