"""Steps of completions, and what a completion is worth by the rewards of its steps.

Guarantee: steps follow each other without a gap and make up the whole text, and none is white space alone unless all of the text
is. A pattern that backtracks without end costs its completion `time_s` and no more; other threads run meanwhile.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import regex

from producer.rewards.messages import Scores
from producer.rewards.spans import finite, text_of
from protocol.config.reward_options import Steps

Ends = list[int] | Exception
"""The ends of the steps of a completion, in characters, or the reason why it has none."""
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda rewards: math.fsum(rewards) / len(rewards),
    "min": min,
    "last": lambda rewards: rewards[-1],
    "product": math.prod,
}


def split(completions: Sequence[Any], steps: Steps) -> list[Ends]:
    """Find the steps of each completion; a text of nothing has none."""
    pattern = regex.compile(steps.pattern)
    found: list[Ends] = []
    for completion in completions:
        try:
            if (text := text_of(completion)) is None:
                raise ValueError("the completion has several messages, and steps are those of one")
            found.append(_ends(pattern, text, steps))
        except (TimeoutError, ValueError) as error:
            found.append(error)
    return found


def _ends(pattern: Any, text: str, steps: Steps) -> list[int]:
    ends, blank_to, last = list[int](), 0, len(text.rstrip())
    try:
        for match in pattern.finditer(text, timeout=steps.time_s, concurrent=True):
            end = match.end()
            if end >= last or len(ends) == steps.max_steps - 1:
                break
            if text[blank_to:end].strip():
                ends.append(end)
            blank_to = end
    except TimeoutError:
        raise TimeoutError(f"the pattern of its steps took more than {steps.time_s:g} seconds") from None
    return [*ends, len(text)] if text else []


def step_texts(completion: Any, ends: Ends) -> list[str]:
    text = text_of(completion) or ""
    return [] if isinstance(ends, Exception) else [text[begin:end] for begin, end in pairwise([0, *ends])]


def as_spans(rewards: Sequence[Sequence[float] | None], ends: list[Ends]) -> list[Any]:
    """Return the rewards of steps in the form that a reward function returns. Raise ValueError if they are not one finite number
    for each step."""
    if len(rewards) != len(ends):
        raise ValueError(f"returned rewards of {len(rewards)} completions for {len(ends)}; return a list for each")
    returned = list[Any]()
    for row, (given, places) in enumerate(zip(rewards, ends, strict=True)):
        known = [] if isinstance(places, Exception) else places
        if given is not None and len(given) != len(known):
            raise ValueError(f"returned {len(given)} rewards for the {len(known)} steps of completion {row}")
        checked = [finite(reward, f"returned a reward of completion {row} that") for reward in given or ()]
        if isinstance(places, Exception) or given is None:
            returned.append(places if isinstance(places, Exception) else None)
        else:
            returned.append({"characters": list(zip(known, checked, strict=True))} if known else 0.0)
    return returned


def reduced(scores: Scores, steps: Steps) -> Scores:
    """Return the scores with what each completion is worth by its steps; the sum is in them already."""
    if scores.rewards is None or steps.reduce == "sum":
        return scores
    rewards, failed = list(scores.rewards), dict(scores.failed)
    for row, spans in scores.spans.items():
        try:
            rewards[row] = finite(_REDUCTIONS[steps.reduce](spans.rewards), f"has a {steps.reduce} of steps, which")
        except ValueError as error:
            rewards[row], failed[row] = math.nan, ("invalid", f"reward {row} {error}")
    return msgspec.structs.replace(scores, rewards=rewards, failed=failed)
