"""The two forms of a prompt.

Guarantee: both daemons tell a chat prompt from a malformed one alike.
"""

from typing import Any


def is_conversational(prompt: Any) -> bool:
    """Whether it is a list of messages, each with a role and a content, and not empty."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )
