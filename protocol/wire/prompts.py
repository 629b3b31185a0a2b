"""The two forms of a prompt, and how they become tokens.

Guarantee: both daemons accept the same prompts and count the same tokens in them. Python files of a model's own run only with
`model.trust_remote_code`.
"""

from pathlib import Path
from typing import Any

from protocol.wire.digests import cannot_load


def load_tokenizer(folder: Path, *, trust_remote_code: bool, **options: Any) -> Any:
    """
    Args:
        options: of `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, ImportError) as error:
        raise cannot_load(f"the tokenizer in {folder}", error) from error


def is_conversational(prompt: Any) -> bool:
    """Whether it is a list of messages, each with a role and a content, and not empty."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


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
