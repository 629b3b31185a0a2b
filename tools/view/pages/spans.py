"""The tokens of a completion as pieces of text, each with the colour of what is asked about it.

Guarantee: pure; a token's class and its hover text are made of the numbers in the journal and of nothing else. Together the spans
are the text. Characters that would move the cursor, hide or turn round what follows are shown as escapes.
"""

import math
from bisect import bisect_left
from typing import Literal, NamedTuple, get_args

from replay.groups import RolloutGroup
from tools.tables import printable

Colour = Literal["logprob", "version", "mask", "none"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
SURPRISE = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Upper bounds of the classes `l0` to `l6` of -log-prob, in nats; `l7` is above the last."""
_VERSION_COLOURS = 8


class Span(NamedTuple):
    text: str
    kind: str = ""  # classes of its element
    title: str = ""


def spans(group: RolloutGroup, tokens: slice, pieces: list[str], colour: Colour) -> list[Span]:
    """One span for each of these tokens; `pieces` are their texts."""
    oldest = int(group.versions.min())
    columns = (group.completion_ids, group.logprobs, group.versions, group.is_sampled)
    numbers = zip(*(column[tokens].tolist() for column in columns), strict=True)
    found = []
    for piece, (token, logprob, version, sampled) in zip(pieces, numbers, strict=True):
        title = f"id {token} {printable(piece)!r}"
        title += f", log-prob {logprob:.4f}, version {version}" if sampled else ", not sampled"
        kind = _kind(colour, logprob, version - oldest, sampled=sampled)
        found.append(Span(printable(piece, keep="\n\t"), kind, title))
    return found


def _kind(colour: Colour, logprob: float, age: int, *, sampled: bool) -> str:
    if not sampled:
        return "masked"
    match colour:
        case "logprob":
            return "unscored" if math.isnan(logprob) else f"l{bisect_left(SURPRISE, -logprob)}"
        case "version":
            return f"v{age % _VERSION_COLOURS}"
        case "mask":
            return "sampled"
    return ""


def plain(text: str) -> list[Span]:
    return [Span(printable(text, keep="\n\t"))]
