"""Competition problems as a task, from rows in verl's form. Nothing here knows Slipstream."""

from typing import Any


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A row with chat messages, which ask for the answer in a box, and the answer of its rule, to prompt and answer."""
    return {"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]}
