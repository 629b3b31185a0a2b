"""The tokens of a completion as pieces of text, each with the colour of what is asked about it.

Guarantee: pure; a token's class and its hover text are made of the numbers in the journal, and of those under the newest
policy where these were computed. Together the spans
are the text. Characters that would move the cursor, hide or turn round what follows are shown as escapes.
"""

import math
from bisect import bisect_left
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from replay.groups import RolloutGroup
from tools.tables import printable
from tools.view.scores.kept import Scores

Colour = Literal["logprob", "version", "mask", "ratio", "entropy", "none"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
OF_SCORES: tuple[Colour, ...] = ("ratio", "entropy")
SURPRISE = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Upper bounds of the classes `l0` to `l6` of -log-prob, in nats; `l7` is above the last."""
RATIOS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""Upper bounds of the classes `q0` to `q5` of the importance ratio; `q6` is above the last."""
_VERSION_COLOURS = 8


class Span(NamedTuple):
    text: str
    kind: str = ""  # classes of its element
    title: str = ""


def spans(
    group: RolloutGroup, tokens: slice, pieces: list[str], colour: Colour, scores: Scores | None = None
) -> list[Span]:
    """One span for each of these tokens; `pieces` are their texts. `scores` are of the whole group."""
    columns = (group.completion_ids, group.logprobs, group.versions, group.is_sampled)
    numbers = zip(*(column[tokens].tolist() for column in columns), strict=True)
    kinds, now = _kinds(group, tokens, colour, scores), _now(group, tokens, scores)
    found = []
    for piece, kind, said, (token, logprob, version, sampled) in zip(pieces, kinds, now, numbers, strict=True):
        title = f"id {token} {printable(piece)!r}"
        title += f", log-prob {logprob:.4f}, version {version}{said}" if sampled else ", not sampled"
        found.append(Span(printable(piece, keep="\n\t"), kind if sampled else "masked", title))
    return found


def _now(group: RolloutGroup, tokens: slice, scores: Scores | None) -> list[str]:
    """What the newest policy thinks of each token, in words."""
    logprobs = group.logprobs[tokens]
    if scores is None:
        return [""] * len(logprobs)
    columns = (*scores.part(tokens), scores.part(tokens).ratios(logprobs))
    return [
        f", log-prob now {logprob:.4f}, ratio {ratio:.4f}, entropy {entropy:.4f}"
        for logprob, entropy, ratio in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _kinds(group: RolloutGroup, tokens: slice, colour: Colour, scores: Scores | None) -> list[str]:
    """The class of each token, if it was sampled."""
    logprobs = group.logprobs[tokens]
    unknown = np.full(len(logprobs), np.nan)
    match colour:
        case "version":
            return [f"v{age % _VERSION_COLOURS}" for age in (group.versions[tokens] - group.versions.min()).tolist()]
        case "logprob":
            return _graded(-logprobs, SURPRISE, "l")
        case "ratio":
            return _graded(scores.part(tokens).ratios(logprobs) if scores else unknown, RATIOS, "q")
        case "entropy":
            return _graded(scores.part(tokens).entropies if scores else unknown, SURPRISE, "l")
    return ["sampled" if colour == "mask" else ""] * len(logprobs)


def _graded(values: NDArray[np.floating[Any]], bounds: tuple[float, ...], letter: str) -> list[str]:
    return ["unscored" if math.isnan(value) else f"{letter}{bisect_left(bounds, value)}" for value in values.tolist()]


def plain(text: str) -> list[Span]:
    return [Span(printable(text, keep="\n\t"))]
