"""The tokens of a completion as pieces of text, each with the colour of what is asked about it.

Guarantee: pure; a token's class and its hover text are made of the numbers in the journal. Together the spans are the text.
Characters that would move the cursor, hide or turn round what follows are shown as escapes.
"""

import math
from bisect import bisect_left
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from replay.groups import RolloutGroup
from slipstream.tables import printable

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
    """Return one span for each of these tokens; `pieces` are their texts."""
    columns = (group.completion_ids, group.logprobs, group.versions, group.is_sampled)
    numbers = zip(*(column[tokens].tolist() for column in columns), strict=True)
    found = []
    for piece, kind, (token, logprob, version, sampled) in zip(
        pieces, _kinds(group, tokens, colour), numbers, strict=True
    ):
        title = f"id {token} {printable(piece)!r}"
        title += f", log-prob {logprob:.4f}, version {version}" if sampled else ", not sampled"
        found.append(Span(printable(piece, keep="\n\t"), kind if sampled else "masked", title))
    return found


def _kinds(group: RolloutGroup, tokens: slice, colour: Colour) -> list[str]:
    """Return the class of each token, if it was sampled."""
    logprobs = group.logprobs[tokens]
    match colour:
        case "version":
            return [f"v{age % _VERSION_COLOURS}" for age in (group.versions[tokens] - group.versions.min()).tolist()]
        case "logprob":
            return _graded(-logprobs)
    return ["sampled" if colour == "mask" else ""] * len(logprobs)


def _graded(values: NDArray[np.floating[Any]]) -> list[str]:
    return ["unscored" if math.isnan(value) else f"l{bisect_left(SURPRISE, value)}" for value in values.tolist()]


def plain(text: str) -> list[Span]:
    return [Span(printable(text, keep="\n\t"))]
