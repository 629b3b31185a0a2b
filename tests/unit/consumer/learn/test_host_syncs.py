"""Between the layout of a micro-batch and the end of its step no operator needs a number on the host.

On a GPU each of those would wait for all that was queued before. `tests/gpu` counts them in whole steps.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from consumer.learn.forward import Layout, Tokens, rows_layout, token_logprobs
from consumer.learn.importance import PRESETS, importance_factors
from consumer.learn.loss import EntropyThreshold, Pass, part_of_loss, values_of
from consumer.learn.micro_batches import Places
from consumer.learn.statistics import Summary, merged, ratio_values, sampled
from tests.unit.consumer.learn.test_forward import as_tree, gradient, head, model, tokens
from tests.unit.consumer.trl_reference import inputs_of_logprobs, loss_options

__all__ = ["model"]  # a fixture

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal")


class Waits(TorchDispatchMode):
    """Notes the operators for which the host of a GPU would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        by_mask = name.startswith(("index", "_index")) and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for argument in args
            if isinstance(argument, (list, tuple))
            for index in argument
        )
        if name in WAITING or by_mask or name == "masked_scatter_backward":
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_what_waits() -> None:
    values = torch.arange(3.0)
    with Waits() as waits:
        int(values.sum())
        values[values > 1]
        values[torch.tensor([1])]
    assert waits.names == ["_local_scalar_dense", "index"]


@pytest.mark.parametrize(("layout", "of_transformers"), [(rows_layout, 1), (as_tree, 0)])
def test_a_pass_and_its_gradient(model: Any, layout: Callable[[Tokens], Layout], of_transformers: int) -> None:
    """transformers asks once in a pass over rows whether they are packed, not in each layer."""
    laid_out = layout(tokens())
    with Waits() as waits:
        gradient(model, token_logprobs(model, laid_out, head))
    assert len(waits.names) <= of_transformers, waits.names


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "sapo"])
def test_the_loss_and_its_numbers(preset: str, loss_type: str) -> None:
    current = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    more = {"ref_per_token_logps": current.detach(), "answer_mask": 1 - mask, "num_answer_tokens": torch.tensor(2)}
    batch = inputs_of_logprobs(torch.full((2, 3), -1.5), torch.tensor([1.0, -1.0]), mask, **more)
    places = Places.of(batch["completion_mask"])
    options = loss_options(loss_type=loss_type, beta=0.1, off_policy_mask_threshold=0.5)
    with Waits() as waits:
        factors = importance_factors(
            PRESETS[preset], current=current, proximal=current.detach(), behaviour=batch["sampling_per_token_logps"],
            advantages=batch["advantages"], mask=batch["completion_mask"],
        )  # fmt: skip
        threshold = EntropyThreshold.at(torch.linspace(0, 1, 4), 0.5)
        loss, seen = part_of_loss(options, batch, Pass(current, current.detach().abs()), factors, threshold=threshold)
        loss.backward()
        ratios = ratio_values(PRESETS[preset], factors, places)
        summary = Summary.of(ratios | values_of(seen, places, current.shape), sampled(ratios, ["ratio"], 4))
        merged([summary, summary])
    assert not waits.names
