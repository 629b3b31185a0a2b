"""Makes the reference answers to prompts into the tokens that the policy would have to sample.

Guarantee: equal rows, prompts and tokenizers give equal tokens, at every start and in a run that is trained again. They stand
behind the prompt as the policy saw it, end as a completion ends, and are at most as many as one has: a longer answer is cut, and
has no end. A prompt whose row has no answer, or none that is text or a number, has none.
"""

import logging
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumer.prompts.dataset import Placeholders, PromptDataset
from consumer.prompts.tokenizer import load_tokenizer
from protocol.config.run import RunConfig
from replay.batch_selection import TrainingBatch
from replay.groups import RolloutGroup

logger = logging.getLogger(__name__)


class Answers:
    """The reference answers of a dataset, for the model in `model_folder`."""

    def __init__(self, config: RunConfig, prompts: PromptDataset | Placeholders, model_folder: Path) -> None:
        self._prompts, self._model_folder = prompts, model_folder
        self._columns = [source.answer_column for source in config.dataset.all_sources.values()]
        self._template = config.dataset.chat_template_kwargs
        self._max_tokens = config.sampling.max_completion_length
        self._trust_remote_code = config.model.trust_remote_code
        self._has_warned = False

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model_folder, trust_remote_code=self._trust_remote_code)

    def add_to(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with the answers of its groups' prompts."""
        return batch._replace(answers=[self._of(group) for group in batch.groups])

    def _of(self, group: RolloutGroup) -> NDArray[np.int32] | None:
        prompt_id = group.lease.key.prompt_id
        prompt, columns = self._prompts[prompt_id]
        column = self._columns[self._prompts.sources.number_of(prompt_id)]
        value = None if column is None else columns.get(column)
        if value is None or value == "":
            return None
        try:
            if not isinstance(value, str | int | float):
                raise TypeError(f"{column!r} must be text, a number or null, got {value!r:.80}")
            tokens = answer_token_ids(self._tokenizer, prompt, group.prompt_ids.tolist(), str(value), self._template)
        except Exception as error:  # a chat template raises what it likes
            if not self._has_warned:
                text = (
                    "%s: its answer cannot be trained: %s: %s. The run goes on without it, and without others like it"
                )
                logger.warning(text, self._prompts.place(prompt_id), type(error).__name__, error)
            self._has_warned = True
            return None
        return np.array(tokens[: self._max_tokens], np.int32) if tokens else None


def answer_token_ids(
    tokenizer: Any, prompt: Any, prompt_ids: list[int], answer: str, chat_template_kwargs: dict[str, Any]
) -> list[int]:
    """Return the tokens of an answer: behind text the answer and the end of a text, behind messages what the chat template makes
    of the assistant's message, up to its end of turn. It may raise whatever a chat template raises.

    Where the tokens of both together do not begin with those of the prompt (tokens that reach over the border, a template that
    writes other things before an answer than before a completion), the answer stands alone, and what ends it behind it.
    """
    alone = partial(tokenizer, add_special_tokens=False)
    if isinstance(prompt, str):
        whole, found, rest = tokenizer(text=prompt + answer)["input_ids"], answer, answer
    else:
        messages = [*prompt, {"role": "assistant", "content": answer}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, **chat_template_kwargs)
        _, found, end = rendered.rpartition(answer.strip())
        whole, rest = alone(text=rendered)["input_ids"], answer + (end if found else tokenizer.eos_token or "")
    length = len(prompt_ids)
    begins = bool(found) and whole[:length] == prompt_ids
    tokens: list[int] = whole[length:] if begins else alone(text=rest)["input_ids"]
    if isinstance(prompt, str):
        return tokens if tokenizer.eos_token_id is None else [*tokens, tokenizer.eos_token_id]
    while tokens and not tokenizer.decode(tokens[-1:]).strip():  # the template's own, behind the end of the turn
        tokens.pop()
    return tokens
