"""Reasoning that a model writes between tags before its answer.

Guarantee: reasoning and answer are separated where the text has the tags, and reasoning is counted in the token ids that were
sampled; a token on a border counts to the part that ends in it. Nothing is encoded again.

A segment of reasoning goes from an opening tag to the next closing one. The first opening tag may be the prompt's (the chat
template's), so a closing tag that comes first ends what begins with the completion. A segment without end goes on to the last
token.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from protocol.config.sections.rewards import ThinkingSection


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
        opened = self._opens(prompt)
        answers, closed = [], []
        for completion, ids in zip(completions, completion_ids, strict=True):
            answer, is_closed = self._answer(completion, ids, opened=opened)
            answers.append(answer)
            closed.append(is_closed)
        counted = [self.count(ids, opened=opened) for ids in completion_ids] if count else []
        return Reasoning(answers, closed, counted)

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

    def _opens(self, prompt: Any) -> bool:
        return prompt.rstrip().endswith(self._opening) if isinstance(prompt, str) else self._template_opens

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
        if self._tags_are_special and (isinstance(completion, str) or len(completion) == 1):
            text, is_closed = self._without(self._decode(ids), opened=opened)
            for token in self._special:
                text = text.replace(token, "")
            return (text if isinstance(completion, str) else [completion[0] | {"content": text}]), is_closed
        if isinstance(completion, str):
            return self._without(completion, opened=opened)
        messages, all_closed = [], True
        for message in completion:
            if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                text, is_closed = self._without(message["content"], opened=opened)
                messages.append(message | {"content": text})
                all_closed &= is_closed
            else:
                messages.append(message)
        return messages, all_closed

    def _without(self, text: str, *, opened: bool) -> tuple[str, bool]:
        found, is_closed = segments(text, self._opening, self._closing, opened=opened)
        kept, place = [], 0
        for start, end in found:
            kept.append(text[place:start])
            place = end
        answer = "".join(kept) + text[place:]
        return (answer.lstrip() if found else answer), is_closed
