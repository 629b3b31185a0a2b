"""One group: its prompt and its completions, the best rewarded first.

Guarantee: what is shown was checked against the journal's checksum. At most `COMPLETIONS` completions are on a page, and of a
record the first and the last `_TOKENS` tokens; what is left out is counted.
"""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from protocol.wire.messages import MissingReward
from slipstream.journal.content import Content
from slipstream.view.index.decoder import Decoder
from slipstream.view.pages.spans import Colour, Span, plain, spans
from slipstream.view.pages.turns import Turn, turns

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


def group_page(
    content: Content,
    facts: dict[str, str],
    decoder: Decoder | None,
    colour: Colour,
    *,
    raw: bool,
    first: int,
    missing: Sequence[MissingReward] = (),
) -> GroupPage:
    """`first` is the rank of the first completion on the page, and `raw` leaves the marks of the chat template in the text.
    `missing` says why rewards are missing."""
    group = content.group
    totals = _totals(content, facts)
    worth = [-math.inf if total is None else total for total in totals]
    ranked = sorted(range(group.num_completions), key=worth.__getitem__)
    shown = ranked[::-1][first : first + COMPLETIONS]
    prompt_ids = group.prompt_ids.tolist()
    prompt = plain(decoder.texts([prompt_ids])[0] if decoder else " ".join(map(str, prompt_ids)))
    completions = []
    for index in shown:
        rewards = dict(zip(content.reward_names, map(_known, group.rewards[index].tolist()), strict=True))
        records = [
            _record(content, number, decoder, colour, raw=raw)
            for number in np.flatnonzero(group.completion_of == index).tolist()
        ]
        why = content.why_missing(missing, index)
        completions.append(Completion(index + 1, totals[index], rewards, why, records))
    return GroupPage(
        _as_turns(prompt, "", raw=raw), completions, first, group.num_completions,
        sorted(set(group.versions.tolist())), content.message.generation_s, content.message.reward_s,
    )  # fmt: skip


def _record(content: Content, number: int, decoder: Decoder | None, colour: Colour, *, raw: bool) -> Record:
    group = content.group
    tokens = group.records[number]
    ids = group.completion_ids[tokens].tolist()
    pieces = decoder.pieces(ids) if decoder else [f"{token} " for token in ids]
    left_out = max(0, len(ids) - 2 * _TOKENS)

    def shown(first: int, last: int) -> list[Span]:
        part = slice(tokens.start + first, tokens.start + last)
        return spans(group, part, pieces[first:last], colour)

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


def _totals(content: Content, facts: dict[str, str]) -> list[float | None]:
    """The weighted sum of each completion's rewards; weights of another number of functions are none."""
    from replay.rewards import weighted_sums  # with the configuration, which takes long to import

    weights = np.array(json.loads(facts.get("reward_weights", "[]")), np.float32)
    if len(weights) != len(content.reward_names):
        weights = np.ones(len(content.reward_names), np.float32)
    return [_known(total) for total in weighted_sums(content.group.rewards, weights).tolist()]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
