"""The forward pass over completions: log-probs and entropies of their tokens, without a computation that is not used.

Guarantee: the same numbers as TRL's pass over left-padded prompts and right-padded completions, to float32 rounding, by one of
two layouts:

    a tree     common beginnings of rows once, the rest behind them, without padding (`consumer.learn.tree`)
    rows       for models that trees do not fit: every prompt stands before its completion without a gap. All padding is at the
               end, where causal attention never looks: no attention mask, and no more columns than the longest row has

Only tokens in the loss go through the LM head. Every query has a key that it may attend to. Padding repeats the last token of
its row, so it is as finite as the row. A layout is made on the CPU; a pass on a GPU waits for no number of it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from trl.kernels import ChunkedLogProbFunction

from consumer.learn.divergence import Teacher, tile_divergences
from consumer.learn.micro_batches import MicroBatch, on_device
from consumer.learn.model import text_model
from consumer.learn.tree import Row, tree_of
from consumer.learn.tree_attention import MakeKernel, tree_pass
from consumer.learn.tree_kernels import TreeKernel
from protocol.config.distillation import DistillationSection
from protocol.errors import ConfigError
from replay.distillation import DistillationRecipe

ApplyHead = Callable[..., tuple[torch.Tensor, ...]]
"""From hidden states (N, H), weights (V, H), bias, targets (N,) and perhaps a `Teacher` to log-probs and entropies (N,), and
divergences from that teacher (N,)."""

_VOCABULARY_CHUNK = 32768  # of TRL's kernel
_TILE_ELEMENTS = 2**23  # of float32 logits: 32 MiB, and as much again for their softmax
_TILES_ON_GPU = 8  # in one
_MIN_TILE_TOKENS = 128  # fewer would read the weights more often than they are worth

_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Configurations name a factor of the logits so; `logits_scaling` divides them, but for HyperCLOVA X."""


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
    def prompt_mask(self) -> torch.Tensor:
        return self.mask[:, : -self.width]

    @property
    def completion_ids(self) -> torch.Tensor:
        return self.ids[:, -self.width :]

    @property
    def in_loss(self) -> torch.Tensor:
        return self.loss_mask.bool()

    @property
    def rows(self) -> list[Row]:
        """The rows without padding."""
        ids, mask, width = self.ids.numpy(), self.mask.bool().numpy(), self.width
        return [
            Row(own[:-width][real[:-width]], own[-width:][real[-width:]]) for own, real in zip(ids, mask, strict=True)
        ]


class Layout(NamedTuple):
    """Describe how the tokens of a micro-batch go through the model. N tokens are in the loss."""

    ids: torch.Tensor  # (rows, columns)
    before: torch.Tensor  # (N,), places in the flattened `ids`, of the token before each token in the loss
    targets: torch.Tensor  # (N,), the tokens in the loss
    in_loss: torch.Tensor  # (N,), their places in the flattened (B, T)
    shape: tuple[int, int]  # (B, T)
    mask: torch.Tensor | None = None  # rows: (B, columns), 0 for padding
    positions: torch.Tensor | None = None  # a tree: as `ids`
    tree: TreeKernel | None = None
    teacher_ids: torch.Tensor | None = None  # (N, 1 + k), as in `Teacher`
    teacher_logprobs: torch.Tensor | None = None  # (N, 1 + k)
    beta: float = 0.0  # of divergences from the teacher

    def with_teacher(self, batch: MicroBatch, recipe: DistillationRecipe | None) -> "Layout":
        """Return it with the log-probs of teachers, if their divergence teaches. It is on the CPU."""
        if recipe is None or not recipe.num_top:
            return self
        ids, logprobs = (batch[name].flatten(0, 1)[self.in_loss] for name in ("teacher_ids", "teacher_logprobs"))
        return self._replace(teacher_ids=ids.long(), teacher_logprobs=logprobs, beta=recipe.beta)

    @property
    def teacher(self) -> Teacher | None:
        if self.teacher_ids is None or self.teacher_logprobs is None:
            return None
        return Teacher(self.teacher_ids, self.teacher_logprobs, self.beta)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, without padding. Ask before the layout is on a GPU."""
        return self.ids.numel() if self.mask is None else int(self.mask.sum())

    def on(self, device: torch.device) -> "Layout":
        """Return it on a device, by one transfer."""
        own = {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}
        of_tree = {} if self.tree is None else {f"tree.{name}": each for name, each in self.tree.tensors.items()}
        found = on_device(own | of_tree, device)
        moved = self._replace(**{name: found[name] for name in own})
        if moved.tree is None:
            return moved
        return moved._replace(
            tree=moved.tree.with_tensors({name: found[f"tree.{name}"] for name in moved.tree.tensors})
        )


class Logits(NamedTuple):
    """The way from the output x of an LM head to logits: softcap · tanh(scale · x / softcap), or scale · x without a softcap."""

    scale: float = 1.0
    softcap: float | None = None


def logits_of(model: Any) -> Logits | None:
    """Return how logits follow from the output of the LM head for the hidden states of the text model; None where they do not.
    Configurations are read as TRL reads them."""
    config = model.config.get_text_config()
    if type(text_model(model).config) is not type(config) or type(model.get_output_embeddings()) is not torch.nn.Linear:
        return None
    scales = [float(scale) for name in _FACTORS if (scale := getattr(config, name, None)) is not None]
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scales.append(float(divisor) if config.model_type == "hyperclovax" else 1 / divisor)
    return Logits(scales[0] if scales else 1.0, getattr(config, "final_logit_softcapping", None))


def check_teachable(section: DistillationSection | None, logits: Logits | None) -> None:
    """Refuse divergences from teachers where logits are not those of the LM head but for a factor.

    Raises:
        ConfigError: names the key and the fix.
    """
    if section is not None and section.num_top and (logits is None or logits.softcap is not None):
        raise ConfigError(
            "distillation.mode: divergence needs logits as the LM head gives them, and this model caps or changes them, or has "
            "experts with trainer.router_aux_loss_coef; set distillation.mode=advantage, or that coefficient to 0"
        )


class Head:
    """The LM head of a model whose logits are known: ours on a CPU, TRL's kernel where Triton runs or logits are scaled.

    Args:
        options: the run's GRPOConfig.
        entropy_trains: whether entropies have a gradient.
    """

    def __init__(self, logits: Logits, options: Any, *, entropy_trains: bool) -> None:
        self._logits, self._options, self._entropy_trains = logits, options, entropy_trains

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """See `ApplyHead`."""
        device, temperature, logits = hidden.device.type, self._options.temperature, self._logits
        is_float32 = self._options.cast_lm_head_to_fp32
        with torch.autocast(device, enabled=False) if is_float32 else contextlib.nullcontext():
            if teacher is not None or (device == "cpu" and logits == Logits()):
                given = (hidden, weight, bias, targets, temperature / logits.scale, self._entropy_trains, teacher)
                return tuple(TokenLogprobs.apply(*given))
            numbers = (_VOCABULARY_CHUNK, logits.softcap, logits.scale, ("log_probs", "entropy"))
            logprobs, entropies, *_ = ChunkedLogProbFunction.apply(hidden, weight, bias, targets, temperature, *numbers)
        return logprobs, entropies


def rows_layout(tokens: Tokens) -> Layout:
    """Lay out whole rows, padded to the longest."""
    lengths = tokens.mask.sum(1)
    longest = int(lengths.max())
    starts = tokens.prompt_mask.size(1) - tokens.prompt_mask.sum(1)
    columns = (
        torch.minimum(torch.arange(longest), lengths[:, None] - 1) + starts[:, None]
    )  # then its last token, repeated
    mask = (torch.arange(longest) < lengths[:, None]).long()
    places = torch.arange(len(columns))[:, None] * longest + torch.arange(longest)
    return _layout(tokens, tokens.ids.gather(1, columns), places)._replace(mask=mask)


def tree_layout(tokens: Tokens, make_kernel: MakeKernel) -> Layout:
    """Lay out rows as a tree.

    Args:
        make_kernel: of a model that `choose_kernel` has prepared.
    """
    tree = tree_of(tokens.rows)
    places = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(place) for place in tree.places], batch_first=True)
    ids, positions = torch.from_numpy(tree.ids)[None], torch.from_numpy(tree.positions)[None]
    return _layout(tokens, ids, places)._replace(positions=positions, tree=make_kernel(tree))


def _layout(tokens: Tokens, ids: torch.Tensor, places: torch.Tensor) -> Layout:
    """Make a layout.

    Args:
        places: (B, columns), in the flattened `ids`, of the tokens of each row.
    """
    in_loss = tokens.in_loss.flatten().nonzero()[:, 0]
    row, token = in_loss // tokens.width, in_loss % tokens.width
    before = places[row, tokens.prompt_mask.sum(1)[row] + token - 1]
    return Layout(ids, before, tokens.completion_ids.flatten()[in_loss], in_loss, tuple(tokens.in_loss.shape))


def token_logprobs(model: Any, layout: Layout, head: ApplyHead) -> tuple[torch.Tensor, ...]:
    """Return (B, T) log-probs and entropies, and divergences if the layout has a teacher; 0 for tokens outside the loss.

    Args:
        layout: on the device of the model.
    """
    linear, hidden = model.get_output_embeddings(), hidden_states(text_model(model), layout)
    teacher = () if layout.teacher is None else (layout.teacher,)
    if len(layout.targets):
        found = head(hidden.to(linear.weight.dtype), linear.weight, linear.bias, layout.targets, *teacher)
    else:  # none, with a gradient: all ranks go back through a model that they share
        found = (linear(hidden.to(linear.weight.dtype)).float().sum(1),) * (2 + len(teacher))
    return tuple(spread(values, layout) for values in found)


def logprobs_by_trl(model: Any, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, None, Any]:
    """Return (B, T) log-probs and entropies by the LM head that TRL gave the model, None for divergences, and the load-balancing
    loss of experts.

    Args:
        layout: of whole rows, on the device of the model.
    """
    labels = torch.full_like(layout.ids, -100).flatten()
    labels = labels.index_put((layout.before + 1,), layout.targets).view(layout.ids.shape)
    found = whole_output(model, layout, has_experts=True, labels=labels, fused_lm_head=True)
    logprobs, entropies = (
        spread(torch.nn.functional.pad(values, (0, 1)).flatten()[layout.before], layout)
        for values in (found.log_probs, found.entropy)
    )
    return logprobs, entropies, None, found.aux_loss


def logprobs_of_whole_logits(
    model: Any, layout: Layout, temperature: float, *, has_experts: bool
) -> tuple[torch.Tensor, torch.Tensor, None, Any]:
    """Return the same from the logits of the model's own forward pass, whatever it makes them of; None without experts."""
    found = whole_output(model, layout, has_experts=has_experts)
    z = (found.logits.flatten(0, 1)[layout.before].float() / temperature).log_softmax(-1)
    logprobs, entropies = z.gather(1, layout.targets[:, None])[:, 0], -(z.exp() * z).sum(-1)
    return spread(logprobs, layout), spread(entropies, layout), None, found.aux_loss if has_experts else None


def whole_output(model: Any, layout: Layout, *, has_experts: bool = False, **options: Any) -> Any:
    """Return what the model's own forward pass returns for whole rows."""
    if has_experts:
        options |= {"attention_mask": layout.mask, "output_router_logits": True}
    return model(input_ids=layout.ids, use_cache=False, **options)


def spread(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return (B, T), from a value for each token in the loss; 0 for others."""
    columns = layout.shape[1]
    places = (layout.in_loss // columns, layout.in_loss % columns)
    return values.new_zeros(layout.shape).index_put(places, values)


def hidden_states(backbone: Any, layout: Layout) -> torch.Tensor:
    """Return hidden states (N, H), before each token in the loss, row by row."""
    if layout.tree is None:
        hidden = backbone(input_ids=layout.ids, use_cache=False).last_hidden_state
    else:
        assert layout.positions is not None
        hidden = tree_pass(backbone, layout.ids, layout.positions, layout.tree)
    return hidden.flatten(0, 1)[layout.before]


class TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Log-probs and entropies (N,) of `targets` (N,), given hidden states (N, H) and weights (V, H), in float32 or wider, and
    divergences (N,) from a teacher.

    Logits exist for one tile of tokens at a time. With a frozen head they do so in the forward pass only: the gradient of a
    token's log-prob (entropy, divergence) with respect to its hidden state does not depend on the loss. So it is made while the
    tile is there, and the backward pass scales it. TRL's kernel projects each tile a second time there: three matrix products in
    place of two. The gradient of a weight is a sum over tokens, so a head that is trained is projected a second time here, too.

    With logits z = (W h + bias) / temperature, p = softmax(z) and H = -Σ p log p:

        d log p_y / dh = (W_y - Σ_v p_v W_v) / temperature        dH / dh = -Σ_v p_v (log p_v + H) W_v / temperature

    With the gradients g of log p_y and e of H, that of W is

        Σ_n G_n h_n' / temperature        G_v = g ([v = y] - p_v) - e p_v (log p_v + H)
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
        teacher: Teacher | None = None,
    ) -> tuple[torch.Tensor, ...]:
        dtype, device = torch.promote_types(hidden.dtype, torch.float32), hidden.device.type
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropies, divergences = torch.empty_like(logprobs), torch.empty_like(logprobs)
        ctx.head_trains = any(ctx.needs_input_grad[1:3])
        if ctx.head_trains:  # the backward pass computes in the same types
            ctx.autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        trains = ctx.needs_input_grad[0] and not ctx.head_trains
        slopes = torch.empty_like(hidden) if trains else None
        entropy_slopes = torch.empty_like(hidden) if trains and entropy_trains else None
        divergence_slopes = torch.empty_like(hidden) if trains and teacher is not None else None
        for part in _tiles(hidden, weight):
            z = _log_p(hidden[part], weight, bias, temperature)
            logprobs[part] = z.gather(1, targets[part, None])[:, 0]
            p = z.exp()
            entropies[part] = -torch.einsum("nv,nv->n", p, z)
            if slopes is not None:
                expected = p.to(weight.dtype) @ weight
                slopes[part] = (weight[targets[part]] - expected) / temperature
            if teacher is not None:
                divergences[part], slope = tile_divergences(z, p, teacher.of(part))
                if divergence_slopes is not None:
                    divergence_slopes[part] = (slope.to(weight.dtype) @ weight) / temperature
            if entropy_slopes is not None:
                z += entropies[part, None]
                entropy_slopes[part] = (p.mul_(z).to(weight.dtype) @ weight) / -temperature
        ctx.temperature, ctx.teacher = temperature, teacher
        of_rows = (slopes, entropy_slopes, divergence_slopes)
        ctx.save_for_backward(*((hidden, weight, bias, targets) if ctx.head_trains else of_rows))
        if not entropy_trains:
            ctx.mark_non_differentiable(entropies)
        return (logprobs, entropies) if teacher is None else (logprobs, entropies, divergences)

    @staticmethod
    def backward(
        ctx: Any, logprob_gradient: torch.Tensor, entropy_gradient: torch.Tensor, *divergence_gradient: torch.Tensor
    ) -> tuple[Any, ...]:
        if ctx.head_trains:
            with ctx.autocast:
                found = _gradients(ctx, logprob_gradient, entropy_gradient, *divergence_gradient)
            return *found, None, None, None, None
        slopes, entropy_slopes, divergence_slopes = ctx.saved_tensors
        gradient = logprob_gradient[:, None].to(slopes.dtype) * slopes
        if entropy_slopes is not None:
            gradient += entropy_gradient[:, None].to(slopes.dtype) * entropy_slopes
        if divergence_slopes is not None:
            gradient += divergence_gradient[0][:, None].to(slopes.dtype) * divergence_slopes
        return gradient, None, None, None, None, None, None


def _tiles(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    tile = max(_MIN_TILE_TOKENS, _TILE_ELEMENTS // len(weight)) * (_TILES_ON_GPU if hidden.is_cuda else 1)
    return (slice(start, start + tile) for start in range(0, len(hidden), tile))


def _log_p(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """Return the log-probs of the vocabulary (tokens, V), in float32 or wider."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    z = torch.nn.functional.linear(hidden, weight, bias).to(dtype).div_(temperature)
    return z.sub_(z.logsumexp(-1, keepdim=True))


def _gradients(
    ctx: Any,
    logprob_gradient: torch.Tensor,
    entropy_gradient: torch.Tensor,
    divergence_gradient: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of hidden states, weights and bias of a head that is trained, summed in float32 or wider."""
    hidden, weight, bias, targets = ctx.saved_tensors
    of_hidden, of_weight, of_bias = (
        torch.zeros_like(each, dtype=logprob_gradient.dtype) if needed else None
        for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
    )
    for part in _tiles(hidden, weight):
        z, g, e = _log_p(hidden[part], weight, bias, ctx.temperature), logprob_gradient[part], entropy_gradient[part]
        p = z.exp()
        of_teacher = None if divergence_gradient is None else tile_divergences(z, p, ctx.teacher.of(part))[1]
        z += -torch.einsum("nv,nv->n", p, z)[:, None]  # log p + H
        of_z = p.mul_(z.mul_(e[:, None]).add_(g[:, None])).neg_()
        of_z = of_z.scatter_add_(1, targets[part, None], g[:, None])
        if divergence_gradient is not None:
            of_z += of_teacher * divergence_gradient[part, None]
        of_z /= ctx.temperature
        if of_hidden is not None:
            of_hidden[part] = of_z.to(weight.dtype) @ weight
        if of_weight is not None:
            of_weight.addmm_(of_z.T, hidden[part].to(of_z.dtype))
        if of_bias is not None:
            of_bias += of_z.sum(0)
    found = zip((hidden, weight, bias), (of_hidden, of_weight, of_bias), strict=True)
    return tuple(None if made is None else made.to(given.dtype) for given, made in found)
