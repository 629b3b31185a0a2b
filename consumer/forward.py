"""The forward pass over completions: log-probs and entropies of their tokens, with nothing computed that nobody needs.

Guarantee: the same numbers as TRL's pass over left-padded prompts and right-padded completions, to float32 rounding, by
whichever of three layouts fits:

    rows     every prompt stands before its completion without a gap, so that all padding is at the end, where causal
             attention never looks: no attention mask, and no more columns than the longest row has tokens
    shared   prompts once each, their keys and values copied to their completions, with gradients
    packed   all rows one behind the other, positions beginning anew, for attention kernels of variable length

Only tokens in the loss go through the LM head.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_WORTH_SHARING = 0.8  # of the tokens, padding included; what is left attends through a mask, which costs something

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From hidden states (N, H), weights (V, H), bias and targets (N,) to log-probs and entropies (N,)."""

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
    def counts(self) -> torch.Tensor:
        return (self.mask[:, -self.width :] if self.loss_mask is None else self.loss_mask).bool()


def is_plain(model: Any) -> bool:
    """Whether the logits of this causal language model are its LM head's output, and its input is text alone."""
    config = model.config
    return (
        config is config.get_text_config()
        and type(model.get_output_embeddings()) is torch.nn.Linear
        and all(getattr(config, name, None) in (None, 1, 1.0) for name in _SCALED)
    )


def is_packable(model: Any) -> bool:
    """Whether its attention kernel takes rows of any length one behind the other."""
    return "flash" in (model.config._attn_implementation or "")


def is_shareable(model: Any) -> bool:
    """Whether every layer's cache is all keys and values, which can be copied to another row."""
    return (
        not model.is_gradient_checkpointing
        and "position_ids" in inspect.signature(model.base_model.forward).parameters
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    )


def token_logprobs(model: Any, tokens: Tokens, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) log-probs and entropies, 0 for tokens that do not count; at least one does."""
    counts, linear = tokens.counts, model.get_output_embeddings()
    hidden = hidden_states(model, tokens).to(linear.weight.dtype)
    logprobs, entropies = head(hidden, linear.weight, linear.bias, tokens.completion_ids[counts])
    return tuple(value.new_zeros(counts.shape).masked_scatter(counts, value) for value in (logprobs, entropies))


def hidden_states(model: Any, tokens: Tokens) -> torch.Tensor:
    """(N, H), before each token that counts, row by row, by the layout that fits."""
    if is_packable(model):
        return hidden_of_packed(model.base_model, tokens)
    if is_shareable(model):
        prompts = distinct_prompts(tokens)
        shared = prompts.ids.numel() + tokens.completion_ids.numel()
        if shared <= _WORTH_SHARING * len(tokens.ids) * int(tokens.mask.sum(1).max()):
            return hidden_with_shared_prompts(model.base_model, tokens, prompts)
    return hidden_of_rows(model.base_model, tokens)


def hidden_of_rows(backbone: Any, tokens: Tokens) -> torch.Tensor:
    prompt_lengths, lengths = tokens.prompt_mask.sum(1), tokens.mask.sum(1)
    columns = torch.arange(int(lengths.max()), device=tokens.ids.device)
    padding = tokens.prompt_ids.size(1) - prompt_lengths
    ids = tokens.ids.gather(1, (columns + padding[:, None]).clamp(max=tokens.ids.size(1) - 1))
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    row, token = tokens.counts.nonzero(as_tuple=True)
    return hidden[row, prompt_lengths[row] + token - 1]


def hidden_of_packed(backbone: Any, tokens: Tokens) -> torch.Tensor:
    real = tokens.mask.bool()
    positions = tokens.mask.cumsum(1) - 1
    hidden = backbone(input_ids=tokens.ids[real][None], position_ids=positions[real][None], use_cache=False)
    place = (real.flatten().cumsum(0) - 1).view(real.shape)[:, -tokens.width :]  # of each token in the pack
    return hidden.last_hidden_state[0, place[tokens.counts] - 1]


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
    return hidden[tokens.counts]


class Prompts(NamedTuple):
    """The distinct prompts of a micro-batch."""

    ids: torch.Tensor  # (G, P), left-padded
    mask: torch.Tensor
    of_row: torch.Tensor  # (B,)


def distinct_prompts(tokens: Tokens) -> Prompts:
    keys, of_row = tokens.prompt_ids.masked_fill(tokens.prompt_mask == 0, -1).unique(dim=0, return_inverse=True)
    return Prompts(keys.clamp(min=0), (keys >= 0).long(), of_row)
