"""The probe of a swap on the trainer's side: a few fixed tokens, and what the present policy thinks of them.

Guarantee: the tokens depend on dataset, tokenizer and seed alone, so every version and every process of a run has the same.
The log-probs are at temperature 1, computed as the loss computes them but without dropout; nothing that training depends on
changes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from protocol.errors import DatasetError

NUM_TOKENS = 8
_MAX_PROMPTS = 64  # that are looked at


def probe_tokens(prompts: Any, tokenizer: Any, seed: int) -> np.ndarray:
    """`NUM_TOKENS` token ids, int32: the beginning of the dataset from a row that the seed chooses, over again if it is
    short."""
    first = seed % len(prompts)
    ids: list[int] = []
    for offset in range(min(_MAX_PROMPTS, len(prompts))):
        try:
            prompt, _ = prompts[(first + offset) % len(prompts)]
        except DatasetError:
            continue
        text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= NUM_TOKENS:
            break
    return np.resize(np.array(ids or [0], np.int32), NUM_TOKENS)


class Measurement(NamedTuple):
    """The tokens, and the log-prob of each but the first under one policy; these may still be on their way."""

    token_ids: np.ndarray
    logprobs: torch.Tensor


class Probe:
    """Measures every so many policies by the same tokens.

    Args:
        every: versions; 0: none.
        autocast: makes the context that the trainer's forward passes run in.
    """

    def __init__(
        self, token_ids: np.ndarray, every: int, model: Any, autocast: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._token_ids = token_ids
        self._every = every
        self._model = model
        self._autocast = autocast

    def measure(self, version: int) -> Measurement | None:
        """The present policy, which is this version."""
        if not self._every or version % self._every:
            return None
        model, trains = self._model, self._model.training
        ids = torch.from_numpy(self._token_ids).long().to(model.device)
        model.eval()
        try:
            with torch.no_grad(), self._autocast():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        finally:
            model.train(trains)
        return Measurement(self._token_ids, logits.log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0])
