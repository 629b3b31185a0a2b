"""The forward pass over completions: log-probs and entropies of their tokens, with nothing computed that nobody needs.

Guarantee: the same numbers as TRL's pass over left-padded prompts and right-padded completions, to float32 rounding, by
whichever of three layouts fits:

    rows     every prompt stands before its completion without a gap, so that all padding is at the end, where causal
             attention never looks: no attention mask, and no more columns than the longest row has tokens
    shared   prompts once each, their keys and values copied to their completions, with gradients
    packed   all rows one behind the other, positions beginning anew, for attention kernels of variable length and models
             of which no layer carries anything from one row to the next

Only tokens in the loss go through the LM head.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from consumer.ranks.sharding import is_sharded, text_model

logger = logging.getLogger(__name__)

_WORTH_SHARING = 0.8  # of the tokens, padding included; what is left attends through a mask, which costs something

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From hidden states (N, H), weights (V, H), bias and targets (N,) to log-probs and entropies (N,)."""

_TRIED_TOKENS = 8  # of each of two rows that must not see each other

_SCALED = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Configurations with one of these do more to hidden states than multiply them by the LM head."""


class Tokens(NamedTuple):
    """A micro-batch as TRL lays it out."""

    ids: torch.Tensor  # (B, P + T): left-padded prompts, right-padded completions
    mask: torch.Tensor  # (B, P + T), 1 for those that are attended to
    width: int  # T
    loss_mask: torch.Tensor | None = None  # (B, T), 1 for those in the loss; None: all completion tokens of `mask`

    @property
    def prompt_ids(self) -> torch.Tensor:
        return self.ids[:, : -self.width]

    @property
    def prompt_mask(self) -> torch.Tensor:
        return self.mask[:, : -self.width]

    @property
    def completion_ids(self) -> torch.Tensor:
        return self.ids[:, -self.width :]

    @property
    def in_loss(self) -> torch.Tensor:
        return (self.mask[:, -self.width :] if self.loss_mask is None else self.loss_mask).bool()


def is_plain(model: Any) -> bool:
    """Whether the logits of this model for text are its LM head's output for the hidden states of its text model."""
    config = model.config.get_text_config()
    return (
        type(text_model(model).config) is type(config)
        and type(model.get_output_embeddings()) is torch.nn.Linear
        and all(getattr(config, name, None) in (None, 1, 1.0) for name in _SCALED)
    )


def is_packable(model: Any) -> bool:
    """Whether its attention kernel takes rows of any length one behind the other, and every layer keeps them apart."""
    if "flash" not in (model.config._attn_implementation or ""):
        return False
    if _cache_layers(model) <= {DynamicLayer, DynamicSlidingWindowLayer} and keeps_rows_apart(model):
        return True
    logger.info("rows are padded instead of packed: layers of this model carry a state from one packed row to the next")
    return False


def keeps_rows_apart(model: Any) -> bool:
    """Whether of two packed rows the second is computed as if the first were not there.

    This is tried, because the configuration does not always say it: some models have recurrent layers that it does not list, and
    others do not hand the positions on to their attention. Whatever a row depends on has a gradient, and where rows are apart it
    is exactly zero.
    """
    if not _takes_positions(model):
        return False
    embeddings, device = model.get_input_embeddings(), model.get_input_embeddings().weight.device
    ids = torch.linspace(0, embeddings.num_embeddings - 1, 2 * _TRIED_TOKENS, device=device).long()
    positions = torch.arange(_TRIED_TOKENS, device=device).repeat(2)
    seen: list[torch.Tensor] = []

    def watch(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[0]

    with torch.enable_grad(), embeddings.register_forward_hook(watch):
        hidden = text_model(model)(input_ids=ids[None], position_ids=positions[None], use_cache=False).last_hidden_state
        second = (
            hidden[0, _TRIED_TOKENS:].float().pow(3).sum()
        )  # a norm may keep the sum, and that of squares, constant
        [gradient] = torch.autograd.grad(second, seen)
    of_first, of_second = gradient[0].split(_TRIED_TOKENS)
    return bool(of_second.any()) and not of_first.any()


def is_shareable(model: Any) -> bool:
    """Whether every layer's cache is all keys and values, which can be copied to another row."""
    return (
        not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        and not is_sharded(model)  # ranks would make different numbers of passes
        and _takes_positions(model)
        and _cache_layers(model) == {DynamicLayer}
        and not getattr(model, "_is_stateful", False)
    )


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(text_model(model).forward).parameters


def _cache_layers(model: Any) -> set[type]:
    """The kinds of its layers, as its configuration names them; `object` for one that transformers does not know."""
    try:
        return {type(layer) for layer in DynamicCache(config=model.config).layers}
    except KeyError:
        return {object}


def token_logprobs(
    model: Any, tokens: Tokens, head: Head, *, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) log-probs and entropies, 0 for tokens outside the loss; at least one does.

    Args:
        packed: only for a model that `is_packable`.
    """
    in_loss, linear = tokens.in_loss, model.get_output_embeddings()
    hidden = hidden_states(model, tokens, packed=packed).to(linear.weight.dtype)
    logprobs, entropies = head(hidden, linear.weight, linear.bias, tokens.completion_ids[in_loss])
    return tuple(value.new_zeros(in_loss.shape).masked_scatter(in_loss, value) for value in (logprobs, entropies))


def hidden_states(model: Any, tokens: Tokens, *, packed: bool = False) -> torch.Tensor:
    """(N, H), before each token in the loss, row by row, by the layout that fits."""
    if packed:
        return hidden_of_packed(text_model(model), tokens)
    if is_shareable(model):
        prompts = distinct_prompts(tokens)
        shared = prompts.ids.numel() + tokens.completion_ids.numel()
        if shared <= _WORTH_SHARING * len(tokens.ids) * int(tokens.mask.sum(1).max()):
            return hidden_with_shared_prompts(text_model(model), tokens, prompts)
    return hidden_of_rows(text_model(model), tokens)


def hidden_of_rows(backbone: Any, tokens: Tokens) -> torch.Tensor:
    prompt_lengths, lengths = tokens.prompt_mask.sum(1), tokens.mask.sum(1)
    columns = torch.arange(int(lengths.max()), device=tokens.ids.device)
    padding = tokens.prompt_ids.size(1) - prompt_lengths
    ids = tokens.ids.gather(1, (columns + padding[:, None]).clamp(max=tokens.ids.size(1) - 1))
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    row, token = tokens.in_loss.nonzero(as_tuple=True)
    return hidden[row, prompt_lengths[row] + token - 1]


def hidden_of_packed(backbone: Any, tokens: Tokens) -> torch.Tensor:
    real = tokens.mask.bool()
    positions = tokens.mask.cumsum(1) - 1
    hidden = backbone(input_ids=tokens.ids[real][None], position_ids=positions[real][None], use_cache=False)
    place = (real.flatten().cumsum(0) - 1).view(real.shape)[:, -tokens.width :]  # of each token in the pack
    return hidden.last_hidden_state[0, place[tokens.in_loss] - 1]


def hidden_with_shared_prompts(backbone: Any, tokens: Tokens, prompts: "Prompts") -> torch.Tensor:
    ids, mask, of_row = prompts.ids, prompts.mask, prompts.of_row
    whole = bool(mask.all())
    cache = DynamicCache(config=backbone.config)
    before = backbone(
        input_ids=ids,
        attention_mask=None if whole else mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[:, -1]
    cache.reorder_cache(of_row)
    lengths = mask.sum(1)[of_row]
    columns = torch.arange(tokens.width, device=ids.device)
    after = backbone(
        input_ids=tokens.completion_ids,
        attention_mask=None if whole else torch.cat([mask[of_row], torch.ones_like(tokens.completion_ids)], 1),
        position_ids=lengths[:, None] + columns,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    hidden = torch.cat([before[of_row, None], after[:, :-1]], 1)
    return hidden[tokens.in_loss]


class Prompts(NamedTuple):
    """The distinct prompts of a micro-batch."""

    ids: torch.Tensor  # (G, P), left-padded
    mask: torch.Tensor
    of_row: torch.Tensor  # (B,)


def distinct_prompts(tokens: Tokens) -> Prompts:
    keys, of_row = tokens.prompt_ids.masked_fill(tokens.prompt_mask == 0, -1).unique(dim=0, return_inverse=True)
    return Prompts(keys.clamp(min=0), (keys >= 0).long(), of_row)
