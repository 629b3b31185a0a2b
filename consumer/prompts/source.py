"""What gives a prompt for its number. Nothing here imports a library: whoever gives and whoever asks know only this."""

from typing import Any, Protocol

Prompt = tuple[Any, dict[str, Any]]
"""A string or a list of messages, and the columns of its row."""


class PromptSource(Protocol):
    def __getitem__(self, prompt_id: int) -> Prompt | None:
        """Raises DatasetError for a row without a usable prompt. None: it is being read; whoever reads it wakes the channel."""
        ...
