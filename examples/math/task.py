"""Competition problems as a task. Nothing here knows Slipstream."""

from typing import Any

PROBLEM, ANSWER = "problem", "answer"  # columns of the dataset
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A row with a problem and its answer to a chat prompt and the answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row[PROBLEM]}]
    return {"prompt": messages, "answer": row[ANSWER]}
