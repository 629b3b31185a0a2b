"""The rows on which a model is tried before it trains, and how far its numbers may differ in them.

Guarantee: rows are longer than any sliding window, which is shrunk where such rows would take long. Their tokens are spread over
the vocabulary, and none stands for an image. Dropout is off. Equal models have equal rows, on every rank.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from consumer.learn.model import text_model
from consumer.learn.shards import gathered
from consumer.learn.tree import Row

SHORT = 20  # tokens of a row

_LONG = 256
_WORK = {"cpu": 5e10, "cuda": 1e14}  # parameters times tokens of long rows: a second or so
_PASSES = 6  # over tokens of a long row, in a trial
_WINDOW = 6  # to which larger ones are shrunk
_IS_WINDOW = re.compile(r"window(_size)?$|attention_chunk_size$|local_attention$")
_SIXTEEN_BITS = 0.1  # of the norm of hidden states
_MORE_BITS = 1e-3


def rows_to_try(model: Any, length: int) -> list[Row]:
    """Return two rows of one prompt, and one of another."""
    prompt, completion = length - length * 2 // 5, length * 2 // 5
    sizes = [prompt, completion, completion, prompt, completion]
    size = model.get_input_embeddings().weight.size(0)
    stands_for_images = {
        value for name, value in vars(model.config).items() if name.endswith(("_token_id", "_token_index"))
    }
    usual = np.setdiff1d(np.arange(1, size), [image for image in stands_for_images if isinstance(image, int)])
    ids = usual[np.linspace(0, len(usual) - 1, sum(sizes)).astype(np.int64)]
    first, one, two, other, last = np.split(ids, np.cumsum(sizes)[:-1])
    return [Row(first, one), Row(first, two), Row(other, last)]


def long_length(model: Any, longest: int | None = None) -> int | None:
    """Return the length of long rows; None where they would take too long.

    Args:
        longest: row of the run.
    """
    text, device = text_model(model), model.get_input_embeddings().weight.device.type
    bound = longest or getattr(text.config, "max_position_embeddings", None) or _LONG
    work = sum(parameter.numel() for parameter in text.parameters()) * _PASSES
    length = int(min(_LONG, bound, _WORK.get(device, 0) / work))
    return length if length > SHORT else None


@contextmanager
def windows_within(model: Any) -> Iterator[None]:
    """Shrink all windows so that short rows reach beyond them: those of configurations and those of layers."""
    with ExitStack() as shrunk:
        modules = list(text_model(model).modules())
        configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
        for owner in (*modules, *configs.values()):
            for name, value in list(vars(owner).items()):
                if _IS_WINDOW.search(name) and type(value) is int and value > _WINDOW:
                    shrunk.enter_context(patch.object(owner, name, _WINDOW))
        yield


def alone(model: Any, row: Row) -> torch.Tensor:
    """Return the hidden states of a row that is alone in its pass."""
    return hidden_of(model, np.concatenate(row)[None])[0]


def hidden_of(model: Any, ids: Any, positions: Any = None) -> torch.Tensor:
    """Return the hidden states (B, S, H) of these rows."""
    device = model.get_input_embeddings().weight.device
    given = {"input_ids": torch.from_numpy(ids).to(device), "use_cache": False}
    if positions is not None:
        given["position_ids"] = torch.from_numpy(positions).to(device)
    with torch.no_grad():
        found: torch.Tensor = gathered(model, lambda: text_model(model)(**given).last_hidden_state)
    return found


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return by how much hidden states differ at the ends of rows, as a share of their norm: of most tokens."""
    ends = [slice(-max(1, len(row) // 4), None) for row in expected]
    ours = torch.cat([row[end] for row, end in zip(found, ends, strict=True)]).double()
    theirs = torch.cat([row[end] for row, end in zip(expected, ends, strict=True)]).double()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).nanmedian())


def largest_difference(model: Any) -> float:
    """Return by how much hidden states may differ in the arithmetic of this model."""
    return _SIXTEEN_BITS if is_in_sixteen_bits(model) else _MORE_BITS


def is_in_sixteen_bits(model: Any) -> bool:
    """Return whether a part of the model's arithmetic rounds to 16 bits or fewer, as that of a quantized base does."""
    device = model.get_input_embeddings().weight.device.type
    return torch.is_autocast_enabled(device) or any(
        parameter.dtype.itemsize < 4 for parameter in text_model(model).parameters()
    )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off."""
    trains = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(trains)
