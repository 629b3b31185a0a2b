"""Writes an answer behind a prompt of messages as the policy would have to write it.

Guarantee: the text stands behind the prompt as the policy sees it, and has all of the answer. It has no thought that the chat
template invents, and no answer stands inside of a thought that the template opens; such an answer is refused.
"""

import re
from functools import partial
from typing import Any

from protocol.config.rewards import ThinkingSection
from protocol.errors import DatasetError

_MARK = "8c1f0e7a5d9b42f6"
_WORD = "(?:think|thought|reason|analysis)"
_THOUGHT = re.compile(_WORD, re.IGNORECASE)
_TAG = re.compile(r"[<\[][^<>\[\]]*[>\]]")
_OPENED = re.compile(  # "<think>", "[THINK]", "<|channel>thought"
    rf"(?:[<\[][^<>\[\]]*{_WORD}[^<>\[\]]*[>\]]|{_TAG.pattern}[^<>\[\]\s]*{_WORD}[^<>\[\]\s]*)\s*$", re.IGNORECASE
)
_ENDS = re.compile(r"/|end", re.IGNORECASE)
_END_OF_TURN = re.compile(r"\s*\S*")


def answer_text(
    tokenizer: Any, messages: Any, answer: str, chat_template_kwargs: dict[str, Any], tags: ThinkingSection
) -> tuple[str, str]:
    """Return the prompt, and the answer with its end of turn as it stands behind it. Raise DatasetError for an answer without
    a thought where the template opens or writes one, and whatever a chat template raises."""
    render = partial(tokenizer.apply_chat_template, tokenize=False, **chat_template_kwargs)
    prompt: str = render(messages, add_generation_prompt=True)
    closed: str = render(messages)
    shared = next((n for n, (one, other) in enumerate(zip(prompt, closed, strict=False)) if one != other), len(closed))
    tag = _opened_thought(prompt[max(shared - 1, 0) :], tags)  # a "<" that both share is the tag's
    _, mark, end = render([*messages, _assistant(_MARK)]).rpartition(_MARK)
    whole: str = render([*messages, _assistant(answer)])
    turn = (_END_OF_TURN.match(end) or [""])[0].rstrip() if mark else ""
    alone = answer if tag is None else answer.strip().removeprefix(tag).lstrip()
    begins = bool(mark) and whole.startswith(prompt) and whole.endswith(end)
    written = whole[len(prompt) : len(whole) - len(end)] if begins else alone
    is_kept = _dense(written).endswith(_dense(alone))
    between = _dense(written).removesuffix(_dense(alone)) if is_kept else ""
    has_thought = tags.open in between or tags.close in between or _THOUGHT.search(between) is not None
    if tag is not None or has_thought:
        _check_thought(alone, tag or between, tags)
    return prompt, (written if is_kept and not has_thought else alone) + (turn or tokenizer.eos_token or "")


def check_text(prompt: str, answer: str, tags: ThinkingSection) -> None:
    """Raise DatasetError for an answer that would stand inside of the thought that a prompt of text opens."""
    if prompt.rstrip().endswith(tags.open):
        _check_thought(answer, tags.open, tags)


def _check_thought(answer: str, before: str, tags: ThinkingSection) -> None:
    if tags.close not in answer and not any(_THOUGHT.search(tag) and _ENDS.search(tag) for tag in _TAG.findall(answer)):
        raise DatasetError(
            f"{before!r} stands before the answer, which has no thought of its own, so the policy would learn not to think; "
            f"write the thought and {tags.close!r} (rewards.thinking.close) into the answer, or turn thinking off in "
            "dataset.chat_template_kwargs"
        )


def _opened_thought(text: str, tags: ThinkingSection) -> str | None:
    """Return the tag of a thought that is open at the end of a text that a template wrote; None if none is."""
    if text.rstrip().endswith(tags.open):
        return tags.open
    last = _OPENED.search(text)
    return None if last is None or _ENDS.search(last[0]) else last[0].rstrip()


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _dense(text: str) -> str:
    return "".join(text.split())
