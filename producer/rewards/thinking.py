"""Reasoning that a model writes between tags before its answer, and what each reward function sees of it.

Guarantee: reasoning and answer are separated where the text has the tags, and reasoning is counted in the token ids that were
sampled; a token on a border counts to the part that ends in it. Nothing is encoded again. A function that shall not see reasoning
never does, and a completion whose reasoning does not end gets what `rewards.thinking.unclosed` says.

A segment of reasoning goes from an opening tag to the next closing one. The first opening tag may be the prompt's (the chat
template's), so a closing tag that comes first ends what begins with the completion. A segment without end goes on to the last
token.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from producer.rewards.worker import Job, Scores
from protocol.config.sections.rewards import RewardFunction, RewardsSection, ThinkingSection


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of a group's completions.

    Args:
        answers: the completions without their reasoning.
        is_closed: whether all reasoning of a completion ended.
        num_tokens: of reasoning, tags included; empty where they were not counted.
    """

    answers: list[Any]
    is_closed: list[bool]
    num_tokens: list[int]


def segments(text: str, opening: str, closing: str, *, opened: bool) -> tuple[list[tuple[int, int]], bool]:
    """Finds reasoning in `text`, tags included, and whether the last segment is closed.

    Args:
        opened: whether the prompt ended with the opening tag.
    """
    first = text.find(closing)
    inside = opened or (first >= 0 and opening not in text[:first])
    found: list[tuple[int, int]] = []
    start = place = 0
    while True:
        if not inside:
            start = text.find(opening, place)
            if start < 0:
                return found, True
            place = start + len(opening)
        end = text.find(closing, place)
        if end < 0:
            return [*found, (start, len(text))], False
        place = end + len(closing)
        found.append((start, place))
        inside = False


class Thinking:
    """Separates reasoning from answers, for one tokenizer.

    Args:
        tokenizer: of the model, from transformers.
        chat_template_kwargs: as prompts are rendered.
    """

    def __init__(self, section: ThinkingSection, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
        self._opening, self._closing = section.open, section.close
        self._tokenizer = tokenizer
        self._chat_template_kwargs = chat_template_kwargs
        special = set(tokenizer.all_special_tokens)
        self._special = sorted(special - {section.open, section.close})
        self._tags_are_special = bool(special & {section.open, section.close})

    def read(self, prompt: Any, completions: list[Any], completion_ids: list[list[int]], *, count: bool) -> Reasoning:
        """Returns reasoning and answers of a group. `count`: also counts tokens, which takes milliseconds for long
        completions."""
        opened = prompt.rstrip().endswith(self._opening) if isinstance(prompt, str) else self._template_opens
        pairs = zip(completions, completion_ids, strict=True)
        found = [self._answer(completion, ids, opened=opened) for completion, ids in pairs]
        counted = [self.count(ids, opened=opened) for ids in completion_ids] if count else []
        return Reasoning([answer for answer, _ in found], [is_closed for _, is_closed in found], counted)

    def count(self, ids: list[int], *, opened: bool) -> int:
        """Counts the tokens of reasoning among these."""
        text = self._decode(ids)
        found, is_closed = segments(text, self._opening, self._closing, opened=opened)
        borders = [(self._tokens_to(ids, text[:start]), self._tokens_to(ids, text[:end])) for start, end in found]
        if borders and not is_closed:
            borders[-1] = borders[-1][0], len(ids)
        return sum(end - start for start, end in borders)

    def _tokens_to(self, ids: list[int], beginning: str) -> int:
        """How many tokens it takes until their text begins with `beginning`."""
        return bisect_left(range(len(ids)), True, key=lambda num: self._decode(ids[:num]).startswith(beginning))

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
        is_text = isinstance(completion, str)
        messages = [{"role": "assistant", "content": completion}] if is_text else completion
        if self._tags_are_special and len(messages) == 1:
            text = self._decode(ids)
            for token in self._special:
                text = text.replace(token, "")
            messages = [messages[0] | {"content": text}]
        kept, all_closed = [], True
        for message in messages:
            if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                answer, is_closed = self._without(message["content"], opened=opened)
                message, all_closed = message | {"content": answer}, all_closed and is_closed
            kept.append(message)
        return (kept[0]["content"] if is_text else kept), all_closed

    def _without(self, text: str, *, opened: bool) -> tuple[str, bool]:
        found, is_closed = segments(text, self._opening, self._closing, opened=opened)
        answer, place = "", 0
        for start, end in [*found, (len(text), len(text))]:
            answer, place = answer + text[place:start], end
        return (answer.lstrip() if found else answer), is_closed


@dataclass(frozen=True)
class View:
    """The part of a group that one reward function sees.

    Args:
        job: what the function is given.
        rows: the rows of the group that the job has.
        num_rows: of the group.
        default_reward: of the other rows; NaN excludes them.
    """

    job: Job
    rows: list[int]
    num_rows: int
    default_reward: float = math.nan

    @classmethod
    def of(cls, section: RewardsSection, function: RewardFunction, job: Job, reasoning: Reasoning | None) -> "View":
        num_rows, unclosed = len(job.completions), section.thinking.unclosed
        rows = list(range(num_rows))
        if reasoning is not None and function.counts_reasoning:
            job = replace(job, reasoning_tokens=reasoning.num_tokens)
        elif reasoning is not None and section.strips(function):
            answers, is_closed = reasoning.answers, reasoning.is_closed
            if unclosed == "as_is":
                shown = [answers[row] if is_closed[row] else job.completions[row] for row in rows]
                return cls(replace(job, completions=shown), rows, num_rows)
            rows = [row for row in rows if is_closed[row]]
            ids = [job.completion_ids[row] for row in rows]
            seen = replace(job, completions=[answers[row] for row in rows], completion_ids=ids)
            return cls(seen, rows, num_rows, math.nan if unclosed == "missing" else float(unclosed))
        return cls(job, rows, num_rows)

    @property
    def excluded_rows(self) -> set[int]:
        """The rows that get no reward of any function."""
        return set(range(self.num_rows)) - set(self.rows) if math.isnan(self.default_reward) else set()

    def scattered(self, scores: Scores) -> Scores:
        """The scores of the job, as scores of the whole group."""
        if len(self.rows) == self.num_rows or scores.rewards is None:
            return scores
        rewards = [self.default_reward] * self.num_rows
        for row, reward in zip(self.rows, scores.rewards, strict=True):
            rewards[row] = reward
        return Scores(rewards, failed={self.rows[index]: why for index, why in scores.failed.items()})
