"""`slipstream journal show` shows one group as people read it.

Guarantee: everything that the journal holds of the group is shown or counted. If the tokenizer cannot be loaded, token ids take
the place of text, and one line says why.
"""

import textwrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import JournalError
from protocol.wire.messages import MissingReward
from replay.groups import RolloutGroup
from replay.journal.reader import JournalReader
from replay.journal.schema import MAX_TRIES, GroupRow
from slipstream.journal.content import Content, ContentReader, load_tokenizer
from slipstream.tables import clock, number, printable, span, span_of_steps, write_line, write_table

Span = NDArray[Any]


def show(reader: JournalReader, lease_id: str, *, every_token: bool) -> None:
    """`JournalError` if the group is not there, or damaged."""
    row = reader.row(lease_id)
    contents = ContentReader(reader)
    content = contents.read(row) if row is not None else None
    if row is None or content is None:
        raise JournalError(f"{reader.path} holds no group {lease_id}; `slipstream journal list` shows what it holds")
    _head(row, content, [span_of_steps(use.step, use.last_step) for use in reader.uses(of_group=lease_id)])
    try:
        tokenizer = load_tokenizer(reader.facts())
    except JournalError as error:
        tokenizer = None
        write_line(f"token ids instead of text: {error}")
    group, missing = content.group, contents.missing(row)
    write_line()
    write_line(f"prompt, {len(group.prompt_ids)} tokens")
    _text(tokenizer, group.prompt_ids)
    for record, tokens in enumerate(group.records):
        write_line()
        _record(content, missing, tokenizer, record, tokens, every_token=every_token)


def _head(row: GroupRow, content: Content, replayed: list[str]) -> None:
    message = content.message
    state: str = row.state
    if row.step is not None and row.last_step is not None:
        state += f", {span_of_steps(row.step, row.last_step)}, position {row.position}"
    for name, value in {
        "group": row.lease_id,
        "state": state + (f", try {row.tries} of {MAX_TRIES}" if row.tries else ""),
        "replayed": ", ".join(replayed) or "never",
        "outcome": row.outcome,
        "verdict": f"{row.verdict}, {row.num_successes} successes of {row.num_scored} scored",
        "prompt": f"{row.prompt_id} in epoch {row.epoch}, attempt {row.reroll + 1}, lease {row.attempt}",
        "policy": f"version {span(row.policy_version, content.group.newest_version)}",
        "producer": f"{row.producer}, {message.generation_s:.2f} s to generate, {message.reward_s:.2f} s to score",
        "arrived": clock(row.accepted_at),
        "size": f"{content.group.num_completions} completions, {row.num_tokens} tokens, {row.num_bytes} bytes",
        "reward": number(row.reward),
    }.items():
        write_line(f"{name:<10}{printable(value)}")


def _record(
    content: Content, missing: list[MissingReward], tokenizer: Any, record: int, tokens: slice, *, every_token: bool
) -> None:
    group = content.group
    cut = ", cut off at the limit" if group.truncated[record] else ""
    sampled = group.is_sampled[tokens]
    others = "" if sampled.all() else f", {sampled.sum()} of them sampled"
    index = int(group.completion_of[record])
    siblings = np.flatnonzero(group.completion_of == index)
    part = f", record {record - siblings[0] + 1} of {len(siblings)}" if len(siblings) > 1 else ""
    rewards = zip(content.reward_names, group.rewards[index].tolist(), strict=True)
    shown = ", ".join(f"{printable(name)} {number(value)}" for name, value in rewards)
    write_line(f"completion {index + 1} of {group.num_completions}{part}, {len(sampled)} tokens{others}{cut}")
    write_line(f"rewards: {shown or 'none'}")
    for name, why in content.why_missing(missing, index).items():
        if why:
            write_line(f"{printable(name)} is missing: {printable(why)}")
    for name, texts in content.message.logged.extra.items():
        write_line(f"logged {printable(name)}: {printable(texts[index])}")
    write_line(f"log-probs: {_summary(group.logprobs[tokens][sampled])}")
    if group.token_versions is not None:
        shares = group.tokens_by_version(tokens).items()
        write_line(f"policies: {', '.join(f'version {version} sampled {count} tokens' for version, count in shares)}")
    if group.teacher_logprobs is not None:
        write_line(f"log-probs of the teacher: {_summary(group.teacher_logprobs[tokens][sampled])}")
    if group.teacher_top_ids is not None and group.teacher_top_logprobs is not None:
        shares = np.exp(group.teacher_top_logprobs[tokens]).sum(1, where=group.teacher_top_ids[tokens] >= 0)[sampled]
        write_line(
            f"its {group.teacher_top_ids.shape[1]} likeliest tokens: probability {shares.mean():.3f} in the mean"
        )
    if spans := [f"{number(reward)} at token {end}" for end, reward in group.span_rewards(tokens).items()]:
        write_line(f"rewards of spans: {', '.join(spans)}")
    _text(tokenizer, group.completion_ids[tokens])
    if every_token:
        header = ("token", "id", "version", "log-prob", "text")
        write_table(header, _token_rows(group, tokenizer, tokens), right="token id version log-prob")


def _summary(logprobs: Span) -> str:
    scored = logprobs[~np.isnan(logprobs)]
    missing = f", {len(logprobs) - len(scored)} tokens without one" if len(scored) < len(logprobs) else ""
    if not len(scored):
        return f"none{missing}"
    return f"mean {scored.mean():.3f}, lowest {scored.min():.3f}, sum {scored.sum():.3f}{missing}"


def _token_rows(group: RolloutGroup, tokenizer: Any, tokens: slice) -> list[tuple[str, ...]]:
    arrays = (group.completion_ids, group.versions, group.logprobs, group.is_sampled)
    return [
        (
            str(place), str(token), *((str(version), number(logprob)) if sampled else ("", "")),
            repr(tokenizer.decode([token])) if tokenizer is not None else "",
        )
        for place, (token, version, logprob, sampled) in enumerate(
            zip(*(values[tokens].tolist() for values in arrays), strict=True)
        )
    ]  # fmt: skip


def _text(tokenizer: Any, ids: Span) -> None:
    if tokenizer is None:
        write_line(textwrap.fill(" ".join(map(str, ids.tolist())), 120, initial_indent="  ", subsequent_indent="  "))
    else:
        write_line(textwrap.indent(printable(tokenizer.decode(ids.tolist()), keep="\n\t"), "  ", lambda line: True))
