"""The forward pass over completions: log-probs and entropies of their tokens, without a computation that is not used.

Guarantee: the same numbers as TRL's pass over left-padded prompts and right-padded completions, to float32 rounding, by
whichever of three layouts fits:

    rows     every prompt stands before its completion without a gap, so that all padding is at the end, where causal
             attention never looks: no attention mask, and no more columns than the longest row has tokens
    shared   prompts once each, their keys and values copied to their completions, with gradients
    packed   all rows one behind the other, positions beginning anew, for attention kernels of variable length and models
             of which no layer carries anything from one row to the next

Only tokens in the loss go through the LM head. No query is without a key that it may attend to, and padding repeats the last
token of its row, so padding is as finite as the row. A layout is made on the CPU; a pass on a GPU waits for no number of it.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from consumer.learn.model import is_sharded, text_model

logger = logging.getLogger(__name__)

_WORTH_SHARING = 0.8  # share of the tokens, padding included, above which the mask costs more than is saved

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From hidden states (N, H), weights (V, H), bias and targets (N,) to log-probs and entropies (N,)."""

_TILE_ELEMENTS = 2**23  # of float32 logits: 32 MiB, and as much again for their softmax
_MIN_TILE_TOKENS = 128  # fewer would read the weights more often than they are worth
_TRIED_TOKENS = 8  # of each of two rows that must not see each other

_SCALED = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Configurations with one of these do more to hidden states than multiply them by the LM head."""


class Tokens(NamedTuple):
    """A micro-batch as TRL lays it out, on the CPU."""

    ids: torch.Tensor  # (B, P + T): left-padded prompts, right-padded completions
    mask: torch.Tensor  # (B, P + T), 1 for those that are attended to
    loss_mask: torch.Tensor  # (B, T), 1 for those in the loss

    @property
    def width(self) -> int:
        """Columns of the completions (T)."""
        return int(self.loss_mask.size(1))

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
        return self.loss_mask.bool()


class Layout(NamedTuple):
    """Describe how the tokens of a micro-batch go through the model. N tokens are in the loss."""

    ids: torch.Tensor  # (rows, columns)
    before: torch.Tensor  # (N,), places in the flattened `ids`, of the token before each token in the loss
    targets: torch.Tensor  # (N,), the tokens in the loss
    in_loss: torch.Tensor  # (N,), their places in the flattened (B, T)
    shape: tuple[int, int]  # (B, T)
    longest: int  # tokens of the longest row
    mask: torch.Tensor | None = None  # rows: (B, columns), 0 for padding
    positions: torch.Tensor | None = None  # packed, shared: as `ids`
    starts: torch.Tensor | None = None  # packed: (B + 1,) int32, where each row begins, and where the last one ends
    prompts: torch.Tensor | None = None  # shared: (G, P), right-padded
    last: torch.Tensor | None = None  # shared: (G,), places in the flattened `prompts`, of the last token of each
    of_row: torch.Tensor | None = None  # shared: (B,), which prompt each row has
    attended: torch.Tensor | None = None  # shared: (B, P + T), 0 for the padding of prompts; None: there is none

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}


def is_plain(model: Any) -> bool:
    """Tell whether the logits of this model for text are its LM head's output for the hidden states of its text model."""
    config = model.config.get_text_config()
    return (
        type(text_model(model).config) is type(config)
        and type(model.get_output_embeddings()) is torch.nn.Linear
        and all(getattr(config, name, None) in (None, 1, 1.0) for name in _SCALED)
    )


def is_packable(model: Any) -> bool:
    """Tell whether its attention kernel takes rows of any length one behind the other, and every layer keeps them apart."""
    if "flash" not in (model.config._attn_implementation or ""):
        return False
    if _cache_layers(model) <= {DynamicLayer, DynamicSlidingWindowLayer} and keeps_rows_apart(model):
        return True
    logger.info("rows are padded instead of packed: layers of this model carry a state from one packed row to the next")
    return False


def keeps_rows_apart(model: Any) -> bool:
    """Tell whether of two packed rows the second is computed as if the first were not there.

    A pass tries it, because the configuration does not always tell: some models have recurrent layers that it does not list, and
    others do not hand the positions on to their attention. Whatever a row depends on has a gradient, and where rows are apart it
    is exactly zero.
    """
    if not _takes(model, "position_ids", "cu_seq_lens_q"):
        return False
    embeddings, device = model.get_input_embeddings(), model.get_input_embeddings().weight.device
    ids = torch.linspace(0, embeddings.num_embeddings - 1, 2 * _TRIED_TOKENS, device=device).long()
    positions = torch.arange(_TRIED_TOKENS, device=device).repeat(2)
    starts = torch.arange(0, 2 * _TRIED_TOKENS + 1, _TRIED_TOKENS, dtype=torch.int32, device=device)
    seen: list[torch.Tensor] = []

    def watch(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[0]

    with torch.enable_grad(), embeddings.register_forward_hook(watch):
        try:
            hidden = _packed_pass(text_model(model), ids[None], positions[None], starts, _TRIED_TOKENS)
        except ValueError:  # transformers refuses it where a kernel of the model cannot keep rows apart
            return False
        second = (
            hidden[0, _TRIED_TOKENS:].float().pow(3).sum()
        )  # a norm may keep the sum, and that of squares, constant
        [gradient] = torch.autograd.grad(second, seen)
    of_first, of_second = gradient[0].split(_TRIED_TOKENS)
    return bool(of_second.any()) and not of_first.any()


def is_shareable(model: Any) -> bool:
    """Tell whether every layer's cache is all keys and values, which can be copied to another row."""
    return (
        not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        and not is_sharded(model)  # ranks would make different numbers of passes
        and _takes(model, "position_ids")
        and _cache_layers(model) == {DynamicLayer}
        and not getattr(model, "_is_stateful", False)
    )


def _takes(model: Any, *names: str) -> bool:
    """Tell whether its text model takes these arguments, by name or to hand them on to its layers."""
    parameters = inspect.signature(text_model(model).forward).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return names[0] in parameters and (hands_on or all(name in parameters for name in names))


def _cache_layers(model: Any) -> set[type]:
    """Return the kinds of its layers, as its configuration names them; `object` for a kind that transformers does not know."""
    try:
        return {type(layer) for layer in DynamicCache(config=model.config).layers}
    except KeyError:
        return {object}


def lay_out(tokens: Tokens, *, packed: bool = False, shareable: bool = False) -> Layout:
    """Return the layout that fits.

    Args:
        packed: only for a model that `is_packable`.
        shareable: the model `is_shareable`.
    """
    if packed:
        return packed_layout(tokens)
    if shareable:
        shared = shared_layout(tokens)
        assert shared.prompts is not None
        if shared.prompts.numel() + shared.ids.numel() <= _WORTH_SHARING * len(tokens.ids) * shared.longest:
            return shared
    return rows_layout(tokens)


def rows_layout(tokens: Tokens) -> Layout:
    lengths = tokens.mask.sum(1)
    longest = int(lengths.max())
    ids = _left_aligned(tokens.ids, tokens.prompt_ids.size(1) - tokens.prompt_mask.sum(1), lengths, longest)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return _layout(tokens, ids, torch.arange(len(ids)) * longest, longest)._replace(mask=mask)


def packed_layout(tokens: Tokens) -> Layout:
    real, lengths = tokens.mask.bool(), tokens.mask.sum(1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    positions = (tokens.mask.cumsum(1) - 1)[real][None]
    found = _layout(tokens, tokens.ids[real][None], starts[:-1], int(lengths.max()))
    return found._replace(positions=positions, starts=starts.int())


def shared_layout(tokens: Tokens) -> Layout:
    keys, of_row = tokens.prompt_ids.masked_fill(tokens.prompt_mask == 0, -1).unique(dim=0, return_inverse=True)
    width, lengths = keys.size(1), (keys >= 0).sum(1)
    prompts = _left_aligned(keys, width - lengths, lengths, width)
    ends = tokens.mask.sum(1)
    ids = _left_aligned(tokens.ids, torch.full_like(ends, width), ends - lengths[of_row], tokens.width)
    is_real = torch.arange(width) < lengths[:, None]
    in_loss = tokens.in_loss.flatten().nonzero()[:, 0]
    return Layout(
        ids=ids,
        before=in_loss,
        targets=tokens.completion_ids.flatten()[in_loss],
        in_loss=in_loss,
        shape=tuple(ids.shape),
        longest=int(ends.max()),
        positions=lengths[of_row][:, None] + torch.arange(tokens.width),
        prompts=prompts,
        last=torch.arange(len(prompts)) * width + lengths - 1,
        of_row=of_row,
        attended=None if is_real.all() else torch.cat([is_real[of_row].long(), torch.ones_like(ids)], 1),
    )


def _layout(tokens: Tokens, ids: torch.Tensor, starts: torch.Tensor, longest: int) -> Layout:
    """Make the layout of rows without gaps, which begin at these places of the flattened `ids`."""
    in_loss = tokens.in_loss.flatten().nonzero()[:, 0]
    row, token = in_loss // tokens.width, in_loss % tokens.width
    before = starts[row] + tokens.prompt_mask.sum(1)[row] + token - 1
    targets = tokens.completion_ids.flatten()[in_loss]
    return Layout(ids, before, targets, in_loss, tuple(tokens.in_loss.shape), longest)


def _left_aligned(ids: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return (B, width): `lengths` tokens of each row from its place in `starts` on; then its last token, repeated."""
    columns = torch.minimum(torch.arange(width), lengths[:, None] - 1) + starts[:, None]
    return ids.gather(1, columns)


def token_logprobs(model: Any, layout: Layout, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T) log-probs and entropies, 0 for tokens outside the loss.

    Args:
        layout: on the device of the model.
    """
    linear, hidden = model.get_output_embeddings(), hidden_states(text_model(model), layout)
    if len(layout.targets):
        found = head(hidden.to(linear.weight.dtype), linear.weight, linear.bias, layout.targets)
    else:
        found = (hidden.float().sum(1),) * 2  # none, with a gradient: all ranks go back through a model that they share
    logprobs, entropies = (spread(values, layout) for values in found)
    return logprobs, entropies


def spread(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return (B, T), from a value for each token in the loss; 0 for others."""
    rows, columns = layout.shape
    return values.new_zeros(rows * columns).index_put((layout.in_loss,), values).view(layout.shape)


def hidden_states(backbone: Any, layout: Layout) -> torch.Tensor:
    """Return hidden states (N, H), before each token in the loss, row by row."""
    if layout.starts is not None:
        hidden = _packed_pass(backbone, layout.ids, layout.positions, layout.starts, layout.longest)
    elif layout.prompts is not None:
        hidden = _shared_pass(backbone, layout)
    else:
        hidden = backbone(input_ids=layout.ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[layout.before]


def _packed_pass(
    backbone: Any, ids: torch.Tensor, positions: torch.Tensor | None, starts: torch.Tensor, longest: int
) -> torch.Tensor:
    """Tell the model where rows begin: transformers would ask the device in every layer."""
    found: torch.Tensor = backbone(
        input_ids=ids,
        position_ids=positions,
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
    ).last_hidden_state
    return found


def _shared_pass(backbone: Any, layout: Layout) -> torch.Tensor:
    """Return hidden states (B, T, H), before each token of the completions."""
    cache = DynamicCache(config=backbone.config)
    prompts = backbone(input_ids=layout.prompts, past_key_values=cache, use_cache=True).last_hidden_state
    before = prompts.flatten(0, 1)[layout.last]
    cache.reorder_cache(layout.of_row)
    after = backbone(
        input_ids=layout.ids,
        attention_mask=layout.attended,
        position_ids=layout.positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return torch.cat([before[layout.of_row][:, None], after[:, :-1]], 1)


class TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Log-probs and entropies (N,) of `targets` (N,), given hidden states (N, H) and weights (V, H), in float32 or wider.

    Logits exist for one tile of tokens at a time, in the forward pass only. The gradient of a token's log-prob (and entropy) with
    respect to its hidden state does not depend on the loss, so it is made while the tile is there, and the backward pass merely
    scales it. TRL's kernel projects each tile a second time there, which makes three matrix products of two.

    With logits z = (W h + bias) / temperature, p = softmax(z) and H = -Σ p log p:

        d log p_y / dh = (W_y - Σ_v p_v W_v) / temperature        dH / dh = -Σ_v p_v (log p_v + H) W_v / temperature
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        entropy_trains: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        trains = ctx.needs_input_grad[0]
        slopes = torch.empty_like(hidden) if trains else None
        entropy_slopes = torch.empty_like(hidden) if trains and entropy_trains else None
        tile = max(_MIN_TILE_TOKENS, _TILE_ELEMENTS // len(weight))
        for start in range(0, len(hidden), tile):
            part = slice(start, start + tile)
            z = torch.nn.functional.linear(hidden[part], weight, bias).to(dtype).div_(temperature)
            z -= z.logsumexp(-1, keepdim=True)  # log p
            logprobs[part] = z.gather(1, targets[part, None])[:, 0]
            p = z.exp()
            entropies[part] = -torch.einsum("nv,nv->n", p, z)
            if slopes is not None:
                expected = p.to(weight.dtype) @ weight
                slopes[part] = (weight[targets[part]] - expected) / temperature
            if entropy_slopes is not None:
                z += entropies[part, None]
                entropy_slopes[part] = (p.mul_(z).to(weight.dtype) @ weight) / -temperature
        ctx.save_for_backward(slopes, entropy_slopes)
        if not entropy_trains:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, logprob_gradient: torch.Tensor, entropy_gradient: torch.Tensor) -> tuple[Any, ...]:
        slopes, entropy_slopes = ctx.saved_tensors
        gradient = logprob_gradient[:, None].to(slopes.dtype) * slopes
        if entropy_slopes is not None:
            gradient += entropy_gradient[:, None].to(slopes.dtype) * entropy_slopes
        return gradient, None, None, None, None, None
