"""Makes the reference answers to prompts into the tokens that the policy would have to sample.

Guarantee: equal rows, prompts and tokenizers give equal tokens, at every start and in a run that is trained again. They stand
behind the prompt as the policy saw it, end as a completion ends, and are at most as many as one has: a longer answer is cut, and
has no end. Of a list of answers it is the first. A prompt whose row has no answer, or none that is text or a number, has none.
"""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumer.prompts.answer_text import answer_text, check_text
from consumer.prompts.completion_limit import CompletionLimit
from consumer.prompts.dataset import Placeholders, PromptDataset
from consumer.prompts.tokenizer import load_tokenizer
from protocol.config.rewards import ThinkingSection
from protocol.config.run import RunConfig
from protocol.errors import DatasetError
from protocol.wire.answers import right_answers
from protocol.wire.messages import unknown_token
from protocol.wire.model_folder import vocabulary_size
from replay.batch_selection import TrainingBatch

logger = logging.getLogger(__name__)


class Answers:
    """The reference answers of a dataset, for the model in `model_folder`."""

    def __init__(self, config: RunConfig, prompts: PromptDataset | Placeholders, model_folder: Path) -> None:
        self._prompts, self._model_folder = prompts, model_folder
        self._vocab_size = vocabulary_size(model_folder)
        self._columns = [source.answer_column for source in config.dataset.all_sources.values()]
        self._template = config.dataset.chat_template_kwargs
        self._thinking = config.rewards.thinking
        self._limit = CompletionLimit.of_run(config.sampling)
        self._trust_remote_code = config.model.trust_remote_code
        self._has_warned = False

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model_folder, trust_remote_code=self._trust_remote_code)

    def add_to(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with the answers of its groups' prompts."""
        answers = [self.of(group.lease.key.prompt_id, group.prompt_ids.tolist()) for group in batch.groups]
        return batch._replace(answers=answers)

    def of(self, prompt_id: int, prompt_ids: list[int]) -> NDArray[np.int32] | None:
        """Return the tokens of a prompt's answer behind its own; None, which the log explains, if it has none to train."""
        prompt, columns = self._prompts[prompt_id]
        column = self._columns[self._prompts.sources.number_of(prompt_id)]
        value = None if column is None else columns.get(column)
        if value is None or value == "":
            return None
        try:
            answer, limit = right_answers(value, str(column))[0], self._limit.of(columns)
            tokens = answer_token_ids(self._tokenizer, prompt, prompt_ids, answer, self._template, self._thinking)
            if problem := unknown_token(self._tokenizer, tokens, self._vocab_size):
                raise DatasetError(f"the answer {problem}")
        except Exception as error:  # a chat template raises what it likes
            if not self._has_warned:
                text = (
                    "%s: its answer cannot be trained: %s: %s. The run goes on without it, and without others like it"
                )
                logger.warning(text, self._prompts.place(prompt_id), type(error).__name__, error)
            self._has_warned = True
            return None
        return np.array(tokens[:limit], np.int32) if tokens else None


def answer_token_ids(
    tokenizer: Any,
    prompt: Any,
    prompt_ids: list[int],
    answer: str,
    chat_template_kwargs: dict[str, Any],
    thinking: ThinkingSection,
) -> list[int]:
    """Return the tokens of an answer: behind text the answer and the end of a text, behind messages what the chat template makes
    of the assistant's message, up to its end of turn (`answer_text`). It may raise whatever a chat template raises.

    Where the tokens of both together do not begin with those of the prompt (tokens that reach over the border), the answer's
    are its own.
    """
    is_text = isinstance(prompt, str)
    if is_text:
        check_text(prompt, answer, thinking)
        before, behind = prompt, answer
    else:
        before, behind = answer_text(tokenizer, prompt, answer, chat_template_kwargs, thinking)
    whole: list[int] = tokenizer(text=before + behind, add_special_tokens=is_text)["input_ids"]
    begins = whole[: len(prompt_ids)] == prompt_ids
    tokens = whole[len(prompt_ids) :] if begins else tokenizer(text=behind, add_special_tokens=False)["input_ids"]
    return [*tokens, tokenizer.eos_token_id] if is_text and tokenizer.eos_token_id is not None else tokens
