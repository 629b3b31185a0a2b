"""A group as an environment of Atropos posts it (`ScoredData`), and the rollouts that are made of it.

Guarantee: of a posted group only scores, masks and advantages are believed. Every token in the loss was sampled by this
engine, behind exactly these tokens, and was not trained before; its log-prob and version are those that were recorded.
"""

from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.groups import Episode, LeaseFailure, Record, Rollouts, group_message
from protocol.wire.messages import Sampling
from slipstream_extras.endpoint.atropos.recorded import RecordedCall, RecordedCalls
from slipstream_extras.endpoint.openai import RefusedError, malformed

_MASKED = -100
_MAX_ENDING = 4
"""Tokens right behind an answer that a chat template adds to end it, and environments therefore do not mask."""

_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Mask = Annotated[int, msgspec.Meta(ge=_MASKED, lt=2**31)]
_Score = Annotated[float, msgspec.Meta(gt=-1e30, lt=1e30)]


class ScoredData(msgspec.Struct):
    """The fields of Atropos. `tokens` and `masks` have one list per sequence; a mask has -100 for tokens that are not to be
    trained. Other fields are ignored: `messages`, `inference_logprobs`, `ref_logprobs` and the like."""

    tokens: list[list[_Token]]
    masks: list[list[_Mask]]
    scores: list[_Score]
    advantages: list[list[_Score] | None] | None = None  # of each token
    overrides: list[Any] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    distill_token_ids: Any = None
    distill_logprobs: Any = None


ScoredGroups: Any = Annotated[list[ScoredData], msgspec.Meta(max_length=1024)]
"""The groups of one request."""


def match_group(
    data: ScoredData, calls: RecordedCalls, sampling: Sampling, *, now: float, takes_advantages: bool = False
) -> tuple[Rollouts, set[RecordedCall]]:
    """Return the group of these sequences, and the recorded calls that it is made of. Raise RefusedError if the group has a field
    that is not supported, contradicts itself, or has a token to be trained that was not sampled here. `now`: seconds of the clock
    of `calls`. A run that `takes_advantages` trains those of tokens as they are posted."""
    _check(data, sampling.num_generations, takes_advantages=takes_advantages)
    taken: set[RecordedCall] = set()
    episodes = []
    for number, (tokens, masks) in enumerate(zip(data.tokens, data.masks, strict=True)):
        token_ids, mask = np.array(tokens, "<i4"), np.array(masks, "<i4")
        if len(mask) != len(token_ids) or ((mask != _MASKED) & (mask != token_ids)).any():
            raise _unfit(number, "a mask has one entry per token, which is -100 or the token itself")
        episodes.append(_episode(number, token_ids, mask != _MASKED, calls, taken))
        if any(data.advantages or ()):
            _credit(number, episodes[-1].records[0], (data.advantages or [])[number], len(token_ids))
    began = min(call.at for call in taken)
    scores = np.array(data.scores, "<f4")[:, None]
    try:
        group_message("", episodes, scores, sampling.max_completion_length, 0.0, 0.0)
    except LeaseFailure as failure:
        raise malformed(failure.detail) from None
    return Rollouts(episodes, max(0.0, now - began), [], scores), taken


def _check(data: ScoredData, num_generations: int, *, takes_advantages: bool) -> None:
    counts = {len(data.tokens), len(data.masks), len(data.scores)}
    if counts != {num_generations}:
        raise malformed(
            f"a group has sampling.num_generations={num_generations} sequences, each with a mask and a score, and this one has "
            f"{len(data.tokens)}, {len(data.masks)} and {len(data.scores)}; give the environment --env.group_size "
            f"{num_generations}",
        )
    if any(data.advantages or ()) and not takes_advantages:
        raise malformed("advantages follow from the scores here; set rewards.credit: given, or post none", "advantages")
    if any(data.advantages or ()) and len(data.advantages or ()) != num_generations:
        raise malformed(
            f"{len(data.advantages or ())} lists of advantages are posted for {num_generations} sequences", "advantages"
        )
    for name in ("images", "distill_token_ids", "distill_logprobs"):
        if getattr(data, name):
            raise malformed(f"{name} cannot be trained here; post none", name)
    if any(data.overrides or ()) or set(data.group_overrides or ()) - {"group_size"}:
        raise malformed("overrides are not honoured here; post none", "overrides")


def _episode(
    number: int, token_ids: NDArray[np.int32], wanted: NDArray[np.bool_], calls: RecordedCalls, taken: set[RecordedCall]
) -> Episode:
    """Return the trained part of the sequence, and add the calls that it is made of to `taken`."""
    record = Record.of(token_ids.tolist())
    missing, truncated = wanted.copy(), False
    spans = calls.find(token_ids, taken)
    ends = {span.end for span in spans if span.end - span.start == len(span.call.token_ids)}  # not within an answer
    for span in spans:
        trained = np.flatnonzero(wanted[span.start : span.end])
        record.logprobs[span.start + trained] = span.call.logprobs[trained]
        record.versions[span.start + trained] = span.call.versions[trained]
        missing[span.start : span.end] = False
        if len(trained):
            taken.add(span.call)
            truncated = span.call.truncated and span.end in ends
    stray = [(start, end) for start, end in _runs(missing) if start not in ends or end - start > _MAX_ENDING]
    if stray:
        raise RefusedError(
            400,
            "not_sampled",
            f"sequence {number}: {int(missing.sum())} of {int(wanted.sum())} tokens to be trained, the first at place "
            f"{stray[0][0]}, were not sampled here behind these tokens, or were trained before. Sequences have to hold the "
            "tokens of calls to this endpoint, sampled as the run is: server_type vllm keeps them, while text that is "
            "tokenized again may differ",
        )
    record = record.cut(len(token_ids))
    if not record.token_ids:
        raise _unfit(number, "it has no token to be trained; the mask leaves out all")
    return Episode(record.first_sampled, [record], truncated=truncated)


def _credit(number: int, record: Record, advantages: list[float] | None, num_tokens: int) -> None:
    """Give every sampled token its advantage, as a span of its own."""
    if len(advantages or ()) != num_tokens:
        raise _unfit(number, f"it has {len(advantages or ())} advantages for {num_tokens} tokens")
    given = np.array(advantages, "<f4")[: len(record.token_ids)]
    record.credit[record.is_sampled] = given[record.is_sampled]


def _runs(of: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the start and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], of, [False])).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _unfit(number: int, why: str) -> RefusedError:
    return malformed(f"sequence {number}: {why}")
