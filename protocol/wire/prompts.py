"""The two forms of a prompt, and how they become tokens.

Guarantee: both daemons accept the same prompts and count the same tokens in them.
"""

from typing import Any


def is_conversational(prompt: Any) -> bool:
    """Whether it is a list of messages, each with a role and a content, and not empty."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def media_in(prompt: Any) -> str | None:
    """The kind of the first part of a message that is not text, as chat templates name it; None if there is none."""
    parts = (
        part for message in (prompt if is_conversational(prompt) else ()) if isinstance(message["content"], list)
        for part in message["content"] if isinstance(part, dict)
    )  # fmt: skip
    return next((str(kind) for part in parts if (kind := part.get("type", "text")) != "text"), None)


def prompt_token_ids(tokenizer: Any, prompt: Any, chat_template_kwargs: dict[str, Any]) -> list[int]:
    """The token ids as in TRL's GRPOTrainer: strings get the tokenizer's special tokens, and messages go through the chat
    template with a generation prompt. It may raise whatever a chat template raises, which is a program of the model's
    author."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    rendered = tokenizer.apply_chat_template(
        conversation=[prompt], add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
    )
    return list(rendered["input_ids"][0])
