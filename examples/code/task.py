"""Programming problems as a task. Nothing here knows Slipstream."""

from typing import Any

SYSTEM = "Write a Python function that solves the problem. Answer with one fenced block of Python."


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A row {"problem": ..., "tests": [...]} to a chat prompt, with the tests for the reward."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}]
    return {"prompt": messages, "tests": row["tests"]}
