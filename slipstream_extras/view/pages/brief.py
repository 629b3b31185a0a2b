"""The beginning of a group's texts, for lists.

Guarantee: pure; a text has at most `_CHARS` characters on one line. Of a chat the question is shown, without the beginning that
all chats have.
"""

from typing import NamedTuple

from slipstream.decoder import Decoder
from slipstream.journal.content import Content
from slipstream.tables import printable
from slipstream_extras.view.pages.group import plain, turns

_CHARS = 160
_TOKENS = 2_048


class Said(NamedTuple):
    text: str
    reward: float | None


class Brief(NamedTuple):
    prompt: str
    best: Said | None = None
    worst: Said | None = None  # None: all rewards are equal, or one is known at most


NOTHING = Brief("")


def brief(content: Content, facts: dict[str, str], decoder: Decoder | None) -> Brief:
    """Shorten a group to its prompt, and to its best and its worst completion."""
    group = content.group
    totals = content.totals(facts)
    known = sorted((total, -number) for number, total in enumerate(totals) if total is not None)
    best = -known[-1][1] if known else 0
    worst = -known[0][1] if known and known[0][0] != known[-1][0] else None
    chosen = [best] if worst is None else [best, worst]
    ids = [group.completion_ids[group.last_record(number)][:_TOKENS].tolist() for number in chosen]
    prompt, *said = _texts([group.prompt_ids[-_TOKENS:].tolist(), *ids], decoder)
    shown = [Said(_line(text), totals[number]) for text, number in zip(said, chosen, strict=True)]
    return Brief(_line(_question(prompt)), shown[0], shown[1] if worst is not None else None)


def _texts(sequences: list[list[int]], decoder: Decoder | None) -> list[str]:
    return decoder.texts(sequences) if decoder else [" ".join(map(str, ids)) for ids in sequences]


def _question(prompt: str) -> str:
    """The last turn of a user; the whole text if there are no turns."""
    asked = [turn for turn in turns(plain(prompt)) if turn.role == "user"]
    return "".join(span.text for span in asked[-1].spans) if asked else prompt


def _line(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= _CHARS else f"{line[: _CHARS - 1]}…"
