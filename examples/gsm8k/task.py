"""GSM8K as a task: rows to prompts, completions to rewards. Nothing here knows Slipstream."""

import re
from typing import Any

SYSTEM = "Reason step by step and put the final number within \\boxed{}."
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A row of openai/gsm8k (`question`, `answer` ending in "#### 72") to a chat prompt and the bare answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "answer": row["answer"].rpartition("####")[2].strip()}


def number(text: str) -> float | None:
    """The last number in `text`: "$1,250.50 dollars" is 1250.5; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def right_answer(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 if the last boxed number is the answer, else 0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        boxed = _BOXED.findall(completion[0]["content"])
        value = number(boxed[-1]) if boxed else None
        rewards.append(float(value is not None and abs(value - float(expected.replace(",", ""))) < 1e-6))
    return rewards


def boxed_once(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """1 if exactly one answer is boxed, else 0."""
    return [float(len(_BOXED.findall(completion[0]["content"])) == 1) for completion in completions]
