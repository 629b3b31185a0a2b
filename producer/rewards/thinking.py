"""Reasoning that a model writes between tags before its answer, and the part of a completion that each reward function sees.

Guarantee: reasoning and answer are separated where the text has the tags, and reasoning is counted in the sampled token ids; a
token on a border counts to the part that ends in it. Nothing is tokenized again. A function that must not see reasoning never
does. A completion whose reasoning does not end gets the reward of `rewards.thinking.unclosed`.

A segment of reasoning extends from an opening tag to the next closing tag. The chat template may have written the first opening
tag into the prompt, so a closing tag that comes first ends a segment that begins with the completion. A segment without a closing
tag extends to the last token.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from typing import Any, Literal

from msgspec.structs import replace

from producer.rewards.messages import Job, Scores
from producer.rewards.spans import ends_in_tokens
from protocol.config.rewards import ThinkingSection

Unclosed = Literal["missing", "as_is"] | float
"""The reward of a completion whose reasoning does not end, as `rewards.thinking.unclosed` has it."""


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of a group's completions."""

    answers: list[Any]  # the completions without it
    is_closed: list[bool]  # whether all of it ended
    num_tokens: list[int]  # tags included; empty where they were not counted


def segments(text: str, opening: str, closing: str, *, opened: bool) -> tuple[list[tuple[int, int]], bool]:
    """Return the segments of reasoning in `text`, tags included, and whether the last one is closed. `opened`: the prompt ended
    with the opening tag."""
    before, first, _ = text.partition(closing)
    begins_inside = opened or (first and opening not in before)
    start = re.escape(opening) + (r"|\A" if begins_inside else "")
    found = list(re.finditer(rf"(?:{start}).*?({re.escape(closing)}|\Z)", text, re.DOTALL))
    return [match.span() for match in found], all(match[1] for match in found)


class Thinking:
    """Separates reasoning from answers, for one tokenizer of transformers; `chat_template_kwargs` as prompts are rendered."""

    def __init__(self, section: ThinkingSection, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
        self._opening, self._closing = section.open, section.close
        self._tokenizer = tokenizer
        self._chat_template_kwargs = chat_template_kwargs
        special = set(tokenizer.all_special_tokens)
        self._special = sorted(special - {section.open, section.close})
        self._tags_are_special = bool(special & {section.open, section.close})

    def read(self, prompt: Any, completions: list[Any], completion_ids: list[list[int]], *, count: bool) -> Reasoning:
        """Return reasoning and answers of a group. `count`: also count tokens, in a time that grows as their number."""
        opened = prompt.rstrip().endswith(self._opening) if isinstance(prompt, str) else self._template_opens
        pairs = zip(completions, completion_ids, strict=True)
        found = [self._answer(completion, ids, opened=opened) for completion, ids in pairs]
        counted = [self.count(ids, opened=opened) for ids in completion_ids] if count else []
        return Reasoning([answer for answer, _ in found], [is_closed for _, is_closed in found], counted)

    def count(self, ids: list[int], *, opened: bool) -> int:
        """Return the number of tokens of reasoning."""
        text = self._decode(ids)
        found, is_closed = segments(text, self._opening, self._closing, opened=opened)
        borders = ends_in_tokens(text, list(chain.from_iterable(found)), ids, self._decode)
        if borders and not is_closed:
            borders[-1] = len(ids)
        return sum(borders[1::2]) - sum(borders[::2])

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    @cached_property
    def _template_opens(self) -> bool:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "?"}],
                add_generation_prompt=True,
                tokenize=False,
                **self._chat_template_kwargs,
            )
        except Exception:  # a template that wants other messages, which rendering the prompts reports
            return False
        return rendered.rstrip().endswith(self._opening)

    def _answer(self, completion: Any, ids: list[int], *, opened: bool) -> tuple[Any, bool]:
        is_text, all_closed = isinstance(completion, str), True
        messages = [{"role": "assistant", "content": completion}] if is_text else list(completion)
        if self._tags_are_special and len(messages) == 1:
            text = self._decode(ids)
            for token in self._special:
                text = text.replace(token, "")
            messages[0] = messages[0] | {"content": text}
        for place, message in enumerate(messages):
            if message.get("role") == "assistant" and isinstance(answer := message.get("content"), str):
                found, is_closed = segments(answer, self._opening, self._closing, opened=opened)
                all_closed = all_closed and is_closed
                borders = [0, *chain.from_iterable(found), len(answer)]
                answer = "".join(answer[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True))
                messages[place] = message | {"content": answer.lstrip() if found else answer}
        return (messages[0]["content"] if is_text else messages), all_closed


def view(
    job: Job, reasoning: Reasoning | None, unclosed: Unclosed, *, counts: bool, strips: bool
) -> tuple[Job, dict[int, float]]:
    """Return the part of a group that a function sees which counts reasoning, or does not see it (`strips`), and the rewards of
    the hidden rows; NaN excludes a row."""
    if reasoning is not None and counts:
        return replace(job, reasoning_tokens=reasoning.num_tokens), {}
    if reasoning is None or not strips:
        return job, {}
    closed = reasoning.is_closed
    if unclosed == "as_is":
        pairs = zip(reasoning.answers, job.completions, closed, strict=True)
        return replace(job, completions=[answer if ended else whole for answer, whole, ended in pairs]), {}
    reward = math.nan if unclosed == "missing" else float(unclosed)
    answers, ids = list(compress(reasoning.answers, closed)), list(compress(job.completion_ids, closed))
    hidden = {row: reward for row, ended in enumerate(closed) if not ended}
    return replace(job, completions=answers, completion_ids=ids), hidden


def with_hidden_rows(scores: Scores, hidden: dict[int, float]) -> Scores:
    """Return the scores of the rows that a function saw as scores of the whole group."""
    if scores.rewards is None or not hidden:
        return scores
    num_rows = len(scores.rewards) + len(hidden)
    rows = [row for row in range(num_rows) if row not in hidden]
    found = hidden | dict(zip(rows, scores.rewards, strict=True))
    extra = {
        name: tuple(dict(zip(rows, texts, strict=True)).get(row, "") for row in range(num_rows))
        for name, texts in scores.logged.extra.items()
    }
    return replace(
        scores,
        logged=replace(scores.logged, extra=extra),
        rewards=[found[row] for row in range(num_rows)],
        failed={rows[i]: why for i, why in scores.failed.items()},
        spans={rows[i]: spans for i, spans in scores.spans.items()},
    )
