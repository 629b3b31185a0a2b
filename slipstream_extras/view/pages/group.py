"""A group: its prompt and its completions in coloured spans and turns, the best rewarded first.

Guarantee: every text shown was checked against the journal's checksum. At most `COMPLETIONS` completions are on a page, and of a
record the first and the last `_TOKENS` tokens; omissions are counted.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from protocol.wire.messages import MissingReward
from replay.distillation import teacher_advantages
from replay.groups import RolloutGroup
from slipstream.decoder import Decoder
from slipstream.journal.content import Content
from slipstream.tables import printable
from slipstream_extras.view.pages.credit import Credit

Colour = Literal["logprob", "version", "mask", "advantage", "teacher", "none"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
SURPRISE = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Upper bounds of the classes `l0` to `l6` of -log-prob, in nats; `l7` is above the last."""
ADVANTAGES = (0.5, 1.5)
"""Upper bounds of the classes `p1` and `p2` of advantages above 0, and `n1` and `n2` of those below, by size. `p3` and `n3` are
beyond; `a0` is 0. Those of a teacher are its log-prob minus the policy's."""
_VERSION_COLOURS = 8
_TOP = 4  # of a teacher's likeliest tokens


class Span(NamedTuple):
    text: str
    kind: str = ""  # classes of its element
    title: str = ""
    reward: str = ""  # of what ends with it


def spans(
    group: RolloutGroup, tokens: slice, pieces: list[str], colour: Colour, credit: Credit | None = None
) -> list[Span]:
    """Return one span for each of these tokens; `pieces` are their texts. The colour of advantages needs `credit`, that of a
    teacher one that was asked."""
    columns = (group.completion_ids, group.logprobs, group.versions, group.is_sampled)
    advantages = credit.advantages[tokens] if credit else None
    numbers = zip(*(column[tokens].tolist() for column in columns), strict=True)
    found, rewards = [], group.span_rewards(tokens)
    for place, (piece, kind, (token, logprob, version, sampled)) in enumerate(
        zip(pieces, _kinds(group, tokens, colour, advantages), numbers, strict=True)
    ):
        title = f"id {token} {printable(piece)!r}"
        title += f", log-prob {logprob:.4f}, version {version}" if sampled else ", not sampled"
        if sampled and group.teacher_logprobs is not None:
            title += f", the teacher's {group.teacher_logprobs[tokens][place]:.4f}"
        if sampled and group.teacher_top_ids is not None and group.teacher_top_logprobs is not None:
            top = zip(group.teacher_top_ids[tokens][place], group.teacher_top_logprobs[tokens][place], strict=True)
            title += "".join(f", its id {one} {value:.4f}" for one, value in list(top)[:_TOP] if one >= 0)
        title += f", advantage {advantages[place]:+.4f}" if sampled and advantages is not None else ""
        title += f", reward {rewards[place]:g} of the span up to it" if place in rewards else ""
        reward = f"{rewards[place]:+g}" if place in rewards else ""
        found.append(Span(printable(piece, keep="\n\t"), kind if sampled else "masked", title, reward))
    return found


def _kinds(group: RolloutGroup, tokens: slice, colour: Colour, advantages: NDArray[np.float64] | None) -> list[str]:
    """Return the class of each token, if it was sampled."""
    logprobs = group.logprobs[tokens]
    match colour:
        case "version":
            return [f"v{age % _VERSION_COLOURS}" for age in (group.versions[tokens] - group.versions.min()).tolist()]
        case "logprob":
            return _graded(-logprobs)
        case "advantage" | "teacher":
            values = teacher_advantages(group)[tokens] if colour == "teacher" else advantages
            assert values is not None
            return [
                f"{'p' if value > 0 else 'n'}{1 + bisect_left(ADVANTAGES, abs(value))}" if value else "a0"
                for value in values.tolist()
            ]
    return ["sampled" if colour == "mask" else ""] * len(logprobs)


def _graded(values: NDArray[np.floating[Any]]) -> list[str]:
    return ["unscored" if math.isnan(value) else f"l{bisect_left(SURPRISE, value)}" for value in values.tolist()]


def plain(text: str) -> list[Span]:
    return [Span(printable(text, keep="\n\t"))]


_MARKS = re.compile(
    r"<\|im_start\|>(?P<chatml>\w{1,32})\n|<\|start_header_id\|>(?P<llama>\w{1,32})<\|end_header_id\|>\n{0,2}"
    r"|<start_of_turn>(?P<gemma>\w{1,32})\n|<(?P<part>think|tool_call|tool_response)>\n?"
    r"|(?P<part_end></(?:think|tool_call|tool_response)>\n{0,2})|(?P<end><\|im_end\|>\n?|<\|eot_id\|>|<end_of_turn>\n?)"
)
_PARTS = {"think": "thinking", "tool_call": "tool call", "tool_response": "tool result"}


class Turn(NamedTuple):
    role: str  # "" where it is unknown
    spans: list[Span]


def turns(found: list[Span], first_role: str = "") -> list[Turn]:
    """The turns of a text. The first turn is of `first_role`. Marks are left out, but not the rewards of what ends there."""
    text = "".join(span.text for span in found)
    result: list[Turn] = []
    role = whose = first_role
    rest = _Rest(found)
    for mark in _MARKS.finditer(text):
        result.append(Turn(role, rest.up_to(mark.start())))
        result[-1].spans.extend(span._replace(text="") for span in rest.up_to(mark.end()) if span.reward)
        speaker = mark["chatml"] or mark["llama"] or mark["gemma"]
        if speaker:
            role = whose = speaker
        elif mark["part"]:
            role = _PARTS[mark["part"]]
        else:
            role = whose if mark["part_end"] else ""
    result.append(Turn(role, rest.up_to(len(text))))
    return [turn for turn in result if any(span.text.strip() or span.reward for span in turn.spans)]


class _Rest:
    """The spans that are not taken yet."""

    def __init__(self, found: list[Span]) -> None:
        self._spans = found[::-1]
        self._at = self._inside = 0  # characters of the text, and of the first span, that are taken

    def up_to(self, end: int) -> list[Span]:
        taken = []
        while self._spans and self._at < end:
            span = self._spans[-1]
            size = min(end - self._at, len(span.text) - self._inside)
            text = span.text[self._inside : self._inside + size]
            self._at, self._inside = self._at + size, self._inside + size
            is_end = self._inside == len(span.text)
            taken.append(span._replace(text=text, reward=span.reward if is_end else ""))
            if is_end:
                self._spans.pop()
                self._inside = 0
        return taken


COMPLETIONS = 16
_TOKENS = 4_096


class Record(NamedTuple):
    turns: list[Turn]
    num_tokens: int
    num_masked: int
    left_out: int
    truncated: bool
    mean_logprob: float | None


class Completion(NamedTuple):
    number: int  # from 1, as generated
    total: float | None
    rewards: dict[str, float | None]  # by function; None where it gave none
    missing: dict[str, str]  # why not, by function; empty where that is not known
    records: list[Record]


class GroupPage(NamedTuple):
    prompt: list[Turn]
    completions: list[Completion]
    first: int  # of the completions, by rank from 0
    num_completions: int
    versions: list[int]
    generation_s: float
    reward_s: float
    has_spans: bool  # that have rewards
    credit: Credit | None
    colour: Colour


def group_page(
    content: Content,
    facts: dict[str, str],
    decoder: Decoder | None,
    colour: Colour,
    *,
    raw: bool,
    first: int,
    missing: Sequence[MissingReward] = (),
    credit: Credit | None = None,
) -> GroupPage:
    """`first` is the rank of the first completion on the page, and `raw` leaves the marks of the chat template in the text.
    `missing` has the reasons of missing rewards. The colour of advantages needs `credit`."""
    group = content.group
    totals = content.totals(facts)
    worth = [-math.inf if total is None else total for total in totals]
    ranked = sorted(range(group.num_completions), key=worth.__getitem__)
    shown = ranked[::-1][first : first + COMPLETIONS]
    prompt_ids = group.prompt_ids.tolist()
    prompt = plain(decoder.texts([prompt_ids])[0] if decoder else " ".join(map(str, prompt_ids)))
    completions = []
    for index in shown:
        rewards = dict(zip(content.reward_names, map(_known, group.rewards[index].tolist()), strict=True))
        records = [
            _record(content, number, decoder, colour, credit, raw=raw)
            for number in np.flatnonzero(group.completion_of == index).tolist()
        ]
        why = content.why_missing(missing, index)
        completions.append(Completion(index + 1, totals[index], rewards, why, records))
    return GroupPage(
        _as_turns(prompt, "", raw=raw), completions, first, group.num_completions,
        sorted(set(group.versions.tolist())), content.message.generation_s, content.message.reward_s,
        group.credit is not None, credit, colour,
    )  # fmt: skip


def _record(
    content: Content, number: int, decoder: Decoder | None, colour: Colour, credit: Credit | None, *, raw: bool
) -> Record:
    group = content.group
    tokens = group.records[number]
    ids = group.completion_ids[tokens].tolist()
    pieces = decoder.pieces(ids) if decoder else [f"{token} " for token in ids]
    left_out = max(0, len(ids) - 2 * _TOKENS)

    def shown(first: int, last: int) -> list[Span]:
        part = slice(tokens.start + first, tokens.start + last)
        return spans(group, part, pieces[first:last], colour, credit)

    if left_out:
        middle = Span(f"\n[... {left_out} tokens left out ...]\n", "left-out")
        found = [*shown(0, _TOKENS), middle, *shown(len(ids) - _TOKENS, len(ids))]
    else:
        found = shown(0, len(ids))
    sampled = group.is_sampled[tokens]
    logprobs = group.logprobs[tokens][sampled]
    scored = logprobs[~np.isnan(logprobs)]
    return Record(
        _as_turns(found, "assistant", raw=raw), len(ids), int((~sampled).sum()), left_out, bool(group.truncated[number]),
        float(scored.mean()) if len(scored) else None,
    )  # fmt: skip


def _as_turns(found: list[Span], first_role: str, *, raw: bool) -> list[Turn]:
    return [Turn("", found)] if raw else turns(found, first_role)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
