"""GSM8K as a task: rows to prompts. Nothing here knows Slipstream."""

from typing import Any

SYSTEM = "Reason step by step and put the final number within \\boxed{}."


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A row of openai/gsm8k (`question`, `answer` ending in "#### 72") to a chat prompt and the bare answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "answer": row["answer"].rpartition("####")[2].strip()}
