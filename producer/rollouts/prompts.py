"""Prompts to token ids, and sampled tokens to what reward functions see.

Guarantee: both follow TRL's GRPOTrainer (strings get the tokenizer's special tokens, messages go through the chat
template with a generation prompt), and a prompt that cannot be used is a `LeaseFailure` that says what to change. What can take
long is done in a thread, because vLLM's output comes over the event loop.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from producer.groups import LeaseFailure
from protocol.runtime.processes import block_import
from protocol.wire.messages import is_conversational, prompt_token_ids, unknown_token
from protocol.wire.model_folder import ANY_SIZE, reading_model

Messages = list[dict[str, Any]]
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def load_tokenizer(folder: Path, *, trust_remote_code: bool, without_torch: bool = False) -> Any:
    """Raise ConfigError where transformers cannot, or not without running files of the model's own. This process can have it
    done `without_torch`, if nothing in it needs models of transformers later."""
    if without_torch and not trust_remote_code and "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is not there
        with block_import("torch"):
            return load_tokenizer(folder, trust_remote_code=False)
    from transformers import AutoTokenizer

    with reading_model(f"the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def malformed(prompt: Any, expected: str) -> LeaseFailure:
    example = "a list of messages such as {'role': 'user', 'content': '...'}"
    return LeaseFailure("bad_prompt", f"{expected} {example}, got {type(prompt).__name__}: {str(prompt)[:80]}")


@dataclass
class PromptFormat:
    """Tokenizer of this run, with its chat template, for a model of `vocab_size` tokens. `placeholders` are tokens that stand for
    images."""

    tokenizer: Any
    max_model_len: int
    chat_template_kwargs: dict[str, Any]
    placeholders: frozenset[int] = field(default=frozenset(), kw_only=True)
    vocab_size: int = field(default=ANY_SIZE, kw_only=True)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"), init=False, repr=False, compare=False
    )

    async def in_thread(self, work: Callable[_Given, _Made], /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        """Run `work` in the tokenizer's only thread and return its result: a tokenizer may refuse to work in two at once."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def encode(self, prompt: Any, max_completion_length: int) -> list[int]:
        """Return the prompt's token ids. Raises LeaseFailure if it is malformed, empty or no text, or leaves no room for the
        completion."""
        if not (isinstance(prompt, str) or is_conversational(prompt)):
            raise malformed(prompt, "expected a string or")
        try:
            ids = prompt_token_ids(self.tokenizer, prompt, self.chat_template_kwargs)
        except Exception as error:  # a template is a program of the model's author and raises whatever it likes
            if isinstance(prompt, str):
                raise
            raise LeaseFailure(
                "bad_prompt",
                f"the chat template refused the messages: {type(error).__name__}: {error}; give plain-string prompts, or "
                "a model.path whose tokenizer has a fitting chat template",
            ) from error
        if not ids:
            raise LeaseFailure("bad_prompt", "the prompt has no tokens; remove the row or give it a text")
        if found := self.placeholders.intersection(ids):
            raise LeaseFailure(
                "bad_prompt",
                f"the prompt has token {min(found)} ({self.tokenizer.decode([min(found)])!r}), in whose place an image or video "
                "is put; prompts are text, also those of vision-language models: take it out of the row",
            )
        self.check_tokens(ids, max_completion_length, "the prompt")
        return ids

    def check_tokens(self, ids: list[int], max_completion_length: int, what: str) -> None:
        """Raise LeaseFailure where the model does not have one of these tokens, or they leave no room for the completion."""
        if problem := unknown_token(self.tokenizer, ids, self.vocab_size):
            raise LeaseFailure("bad_prompt", f"{what} {problem}")
        num_tokens = len(ids)
        room = self.max_model_len - max_completion_length
        if num_tokens > room:
            raise LeaseFailure(
                "prompt_too_long",
                f"{what} has {num_tokens} tokens, but engine.max_model_len={self.max_model_len} less "
                f"sampling.max_completion_length={max_completion_length} leaves {room}; shorten the prompt, lower "
                "sampling.max_completion_length, raise engine.max_model_len, or skip such rows with dataset.max_prompt_tokens: "
                f"{max(room, 1)}",
            )

    def decode(self, prompt: Any, completions: list[list[int]]) -> list[str] | list[Messages]:
        """Return the `completions` that reward functions get: texts, or one assistant message each for message prompts."""
        texts: list[str] = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        if isinstance(prompt, str):
            return texts
        return [[{"role": "assistant", "content": text}] for text in texts]
