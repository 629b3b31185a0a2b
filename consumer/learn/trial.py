"""The trial of a model before its first step: what a row's numbers depend on, and how log-probs follow from hidden states.

Guarantee: behind it a row has the numbers that it has alone, whatever is beside it or was before it, up to the longest row of
the run. Log-probs are those of the model's own logits. Configurations are not asked; the model is. Trees of rows have a trial of
their own (`consumer.learn.tree_attention`).
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from consumer.learn.forward import Layout, Tokens, rows_layout, whole_output
from consumer.learn.memory import is_out_of_memory
from consumer.learn.model import text_model
from consumer.learn.shards import gathered
from consumer.learn.trial_rows import (
    SHORT,
    alone,
    difference,
    evaluating,
    hidden_of,
    is_in_sixteen_bits,
    largest_difference,
    rows_to_try,
)
from protocol.errors import is_device_failure

_MOVED = {True: 3e-2, False: 1e-5}  # share of hidden states, where nothing of a row's own has changed; True: in 16 bits
_OF_LOGPROBS = {True: 3e-2, False: 1e-3}  # share of their spread
_LOUD = 10.0  # spread of logits that shows a cap


def company_problem(model: Any, longest: int) -> str | None:
    """Return on what else the numbers of a row depend; None: on itself alone.

    Args:
        longest: row that the engine takes.
    """
    try:
        with evaluating(text_model(model)):
            return _beside_a_longer_row(model) or _beside_far_positions(model, longest)
    except Exception as error:
        if is_out_of_memory(error) or is_device_failure(error):
            raise
        return f"a pass through its text model raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _beside_a_longer_row(model: Any) -> str | None:
    first, _, other = rows_to_try(model, SHORT)
    row, length = np.concatenate(first), 4 * SHORT
    both = np.stack([np.pad(row, (0, length - len(row)), mode="edge"), np.resize(np.concatenate(other), length)])
    share = difference([hidden_of(model, both)[0, : len(row)]], [alone(model, first)])
    if not share <= largest_difference(model):
        return f"hidden states of a row differ by {share:.1%} where a longer one is beside it"
    return None


def _beside_far_positions(model: Any, longest: int) -> str | None:
    """A pass of the same shape twice, with another row's positions moved to the end of what the engine takes."""
    if longest <= SHORT or "position_ids" not in inspect.signature(text_model(model).forward).parameters:
        return None
    first, _, other = rows_to_try(model, SHORT)
    ids, near = np.stack([np.concatenate(first), np.concatenate(other)]), np.tile(np.arange(SHORT), (2, 1))
    far = np.stack([near[0], near[1] + longest - SHORT])
    before, beside, behind = (hidden_of(model, ids, positions)[0] for positions in (near, far, near))
    for found, where in ((beside, "beside"), (behind, "behind")):
        share = difference([found], [before])
        if not share <= _MOVED[is_in_sixteen_bits(model)]:
            return f"hidden states of a row differ by {share:.1%} {where} a row of {longest} tokens"
    return None


def head_problem(model: Any, logprobs: Callable[[Layout], torch.Tensor], temperature: float) -> str | None:
    """Return how the log-probs (B, T) of a layout differ from those of the model's own logits; None: they are the same. They are
    compared for hidden states as they are, and for larger ones, which show what caps logits.

    Args:
        temperature: that logits are divided by.
    """
    rows = rows_to_try(model, SHORT)[::2]
    ids = torch.from_numpy(np.stack([np.concatenate(row) for row in rows]))
    tokens = Tokens(ids, torch.ones_like(ids), torch.ones(len(rows), len(rows[0].completion), dtype=torch.long))
    layout, factor = rows_layout(tokens).on(model.get_input_embeddings().weight.device), 1.0

    def loud(_module: Any, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    try:
        with evaluating(model), torch.no_grad():
            for is_loud in (False, True):
                with text_model(model).register_forward_hook(loud) if is_loud else nullcontext():
                    logits = gathered(model, lambda: whole_output(model, layout)).logits
                    if int(layout.targets.max()) >= logits.size(-1):
                        return f"the model has logits of {logits.size(-1)} tokens"
                    theirs = (logits.flatten(0, 1)[layout.before].double() / temperature).log_softmax(-1)
                    theirs = theirs.gather(1, layout.targets[:, None])[:, 0]
                    ours = logprobs(layout).double().flatten()[layout.in_loss]
                factor = max(1.0, _LOUD / float(theirs.std()))
                share = float((ours - theirs).square().mean().sqrt() / theirs.std())
                if not share <= _OF_LOGPROBS[is_in_sixteen_bits(model)]:
                    return f"log-probs differ by {share:.1%} of their spread"
    except Exception as error:
        if is_out_of_memory(error) or is_device_failure(error):
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None
