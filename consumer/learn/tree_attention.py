"""Passes over a tree of rows through a model of transformers, for models whose layers can.

Guarantee: a model is given to trees only after small ones went through it. Each token of them depended on no token beside its own
path, and its hidden states were those of rows alone, beyond any sliding window. So recurrent layers, positions that attention
does not get, attention sinks and kernels that the card refuses lead to plain rows, whatever a configuration says. All other
passes through the model, such as those of a probe, compute as before.

A model reaches `tree_attention` by transformers' AttentionInterface, and hands the tree's kernel through its layers as the
argument `tree`. Gradient checkpointing keeps arguments, so a recomputed layer has the same tree.
"""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from consumer.learn.model import text_model
from consumer.learn.shards import gathered
from consumer.learn.tree import Row, Tree, tree_of
from consumer.learn.tree_kernels import FlashKernel, FlexKernel, Options, SegmentKernel, TreeKernel
from consumer.learn.trial_rows import (
    SHORT,
    alone,
    difference,
    evaluating,
    largest_difference,
    long_length,
    rows_to_try,
    windows_within,
)

logger = logging.getLogger(__name__)

IMPLEMENTATION = "slipstream_tree"
"""The name of `tree_attention` among transformers' implementations."""

_OLDEST_CARD = (8, 0)  # compute capability, of FlashAttention 2 and of Triton's kernels
_LAYERS = {"full_attention", "sliding_attention"}

MakeKernel = Callable[[Tree], TreeKernel]


class ChosenKernel(NamedTuple):
    """The attention of trees that a model takes.

    Args:
        name: for the log.
        make: the kernel of a tree, on the CPU.
    """

    name: str
    make: MakeKernel


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: TreeKernel | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as a layer of transformers does; without a tree, by torch's SDPA. Under autocast both take its type."""
    if tree is None:
        options |= {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found, None
    if others := [
        name for name, value in options.items() if isinstance(value, torch.Tensor) and name != "position_ids"
    ]:
        raise ValueError(f"the model's attention also depends on {', '.join(others)}")
    device = query.device.type
    if torch.is_autocast_enabled(device):  # queries and keys may be in float32 there, behind their rotation
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    return tree(module, query, key, value, Options(scaling, sliding_window, softcap)), None


AttentionInterface.register(IMPLEMENTATION, tree_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def tree_pass(backbone: Any, ids: torch.Tensor, positions: torch.Tensor, kernel: TreeKernel) -> torch.Tensor:
    """Return hidden states (1, S, H).

    Args:
        backbone: the text model of a model that `choose_kernel` has prepared.
        ids: (1, S), of a tree, as `positions`.
        kernel: of that tree, with its tensors on the device.
    """
    mask = ids.new_ones((1, 1, 1, 1), dtype=torch.bool)  # of 4 dimensions, so transformers makes none
    found: torch.Tensor = backbone(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, tree=kernel
    ).last_hidden_state
    return found


def choose_kernel(
    model: Any, level: int = logging.INFO, *, attention: Any = None, longest: int | None = None
) -> ChosenKernel | None:
    """Choose the attention of trees for a causal language model where it lies, prepare the model for it, and log the choice.

    Call it in the context of the passes to come. With a sharded base all ranks call it.

    Args:
        level: of the log; one of several ranks is enough for people.
        attention: `trainer.model_init_kwargs.attn_implementation`; None: the file leaves it to transformers.
        longest: row of the run; None: the longest that the model takes.

    Returns:
        None: the rows of this model are padded.
    """
    problem = _obstacle(model, attention)
    if problem is None:
        for chosen in _candidates(model):
            problem = _tried(model, chosen, longest)
            if problem is None:
                logger.log(level, "common beginnings of rows are computed once: attention by %s", chosen.name)
                return chosen
            logger.log(level, "%s does not fit this model or device: %s", chosen.name, problem)
    reason = problem or "no kernel fits the device"
    logger.log(level, "each row is computed as a whole, padded to the longest: %s", reason)
    return None


def _obstacle(model: Any, attention: Any) -> str | None:
    """Return why the rows of a model cannot be a tree, where its configuration or code tells."""
    config, backbone = text_model(model).config, text_model(model)
    # transformers itself chooses `eager` for a model that its SDPA does not fit.
    if config._attn_implementation == "eager" and (attention is not None or backbone._supports_sdpa):
        return "trainer.model_init_kwargs.attn_implementation is eager"
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        return f"the model has layers of {', '.join(sorted(others))}"
    if any(getattr(module, "attention_dropout", 0) for module in backbone.modules()):
        return "the model drops out attention weights (attention_dropout)"
    parameters = inspect.signature(backbone.forward).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters or not hands_on:
        return "the model does not hand positions and other arguments on to its layers"
    return None


def _candidates(model: Any) -> Iterator[ChosenKernel]:
    """Yield the kernels for the device and numbers of this model, the fastest first."""
    config, device = text_model(model).config, model.get_input_embeddings().weight.device
    if device.type == "cpu":
        yield ChosenKernel("torch's attention of CPUs, segment by segment", SegmentKernel)
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _OLDEST_CARD:
        return

    def flex(tree: Tree) -> FlexKernel:
        window = getattr(config, "sliding_window", None)
        return FlexKernel(tree, frozenset() if window is None else frozenset({window}))

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else model.dtype
    if dtype in (torch.float16, torch.bfloat16) and importlib.util.find_spec("flash_attn") is not None:
        function = importlib.import_module("flash_attn").flash_attn_varlen_func
        yield ChosenKernel("FlashAttention (flash-attn)", lambda tree: FlashKernel(tree, function))
    yield ChosenKernel("torch's flex_attention", flex)


def _tried(model: Any, chosen: ChosenKernel, longest: int | None) -> str | None:
    """Send small trees through the model, and leave the model prepared for trees if that went well.

    Returns:
        None, or why not.
    """
    backbone, before = text_model(model), text_model(model).config._attn_implementation
    with evaluating(backbone):
        try:
            with windows_within(model):
                problem = _differs(model, chosen, rows_to_try(model, SHORT), is_short=True)
            backbone.config._attn_implementation = before  # the model's own computes the rows alone
            if problem is None and (length := long_length(model, longest)) is not None:
                problem = _differs(model, chosen, rows_to_try(model, length), is_short=False)
        except Exception as error:  # of a kernel, a compiler or the model: all mean that this does not work
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    backbone.config._attn_implementation = before if problem is not None else IMPLEMENTATION
    return problem


def _differs(model: Any, chosen: ChosenKernel, rows: list[Row], *, is_short: bool) -> str | None:
    """Return how a pass over the tree of these rows is unlike the rows alone. Short rows are also asked what they depend on, of
    which all layers keep activations: whatever a token depends on has a gradient, and where it depends on nothing that is
    exactly zero."""
    backbone, embeddings = text_model(model), model.get_input_embeddings()
    expected = [alone(model, row) for row in rows]
    tree, device, seen = tree_of(rows), embeddings.weight.device, list[torch.Tensor]()

    def watch(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().requires_grad_(is_short))
        return seen[0]

    ids, positions = (torch.from_numpy(each)[None].to(device) for each in (tree.ids, tree.positions))
    kernel = chosen.make(tree)
    kernel = kernel.with_tensors({name: tensor.to(device) for name, tensor in kernel.tensors.items()})
    own = [torch.from_numpy(places).to(device) for places in tree.places]
    backbone.config._attn_implementation = IMPLEMENTATION
    with torch.set_grad_enabled(is_short), embeddings.register_forward_hook(watch):
        hidden = gathered(model, lambda: tree_pass(backbone, ids, positions, kernel))[0]
        for number, (row, places) in enumerate(zip(rows, own, strict=True)):
            if not is_short:
                break
            last = (
                hidden[places[-len(row.completion) :]].float().pow(3).sum()
            )  # a norm may keep the sums of lower powers
            [gradient] = torch.autograd.grad(last, seen, retain_graph=number + 1 < len(rows))
            depends = gradient[0].ne(0).any(-1)
            if not bool(depends[places].any()) or int(depends.sum()) > int(depends[places].sum()):
                return "a layer carries something from one row to another"
    share = difference([hidden.detach()[places] for places in own], expected)
    if not share <= largest_difference(model):
        return f"hidden states differ from those of rows alone, by {share:.1%}"
    return None
