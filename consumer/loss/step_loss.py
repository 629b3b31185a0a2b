"""How the losses of a step's micro-batches add up to the loss of the whole step, and their metrics to its metrics.

Guarantee: however a step is cut, the sum of its micro-batches' losses, and so the gradient, is what TRL computes when all of
its rows are one micro-batch: for every loss type, with entropy bonus, and for batches that are not full.

To TRL every micro-batch is a step of its own, whose loss is a mean. Multiplied by its share of the rows or tokens of the step it
becomes its part of the mean over the step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from consumer.batches.tensors import MicroBatch, loss_mask

TOKEN_SUMS = ("dapo", "cispo", "vespo")
"""Loss types that TRL divides by the tokens of the whole step."""


class NotFiniteStep(Exception):  # noqa: N818  what to do about it is for the loop to say
    """Loss or gradient of the step in progress is NaN or infinite; weights and optimizer are as before it."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss:g}, gradient norm {grad_norm:g}")
        self.loss = loss
        self.grad_norm = grad_norm


@dataclass
class LossCapture:
    """What comes up while TRL computes the loss of a micro-batch."""

    inputs: MicroBatch
    missing_kl: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    entropy_mask: torch.Tensor | None = None

    @property
    def loss_mask(self) -> torch.Tensor:
        return loss_mask(self.inputs)


class EntropyCut(NamedTuple):
    """Which tokens of a step `top_entropy_quantile` leaves."""

    threshold: torch.Tensor
    num_tokens: torch.Tensor

    @classmethod
    def at(cls, entropies: torch.Tensor, quantile: float) -> "EntropyCut":
        threshold = torch.quantile(entropies.to(torch.promote_types(entropies.dtype, torch.float32)), quantile)
        return cls(threshold, (entropies >= threshold).sum())


class MicroBatchSize(NamedTuple):
    """What a micro-batch is of its step."""

    rows: int
    tokens: int  # in the loss


def share_of_step(loss_type: str, size: MicroBatchSize, num_completions: int, num_tokens: int) -> float:
    """What the loss of a micro-batch is multiplied by, so that the losses of a step add up to its loss.

    Args:
        num_completions: of a full step. What a partial one lacks is worth as much as rows without advantage.
        num_tokens: in the loss, in all of the step.
    """
    if loss_type in TOKEN_SUMS:
        return 1.0
    if loss_type == "bnpo":
        return size.tokens / max(1, num_tokens)
    return size.rows / num_completions


def means_over_tokens(
    capture: LossCapture, weight: float, cut: EntropyCut | None, *, entropy_coef: float, aux_loss_coef: float
) -> torch.Tensor | float:
    """TRL weighs entropy bonus and load-balancing loss as it weighs the policy's. Added to its loss, this makes both means over
    the tokens of the step.

    Args:
        weight: what they have been multiplied by.
    """
    mask = capture.loss_mask
    num_tokens, rest = capture.inputs["num_items_in_batch"].clamp(min=1), 0.0
    if capture.aux_loss is not None:
        rest = aux_loss_coef * capture.aux_loss * (mask.sum() / num_tokens - weight)
    if entropy_coef and capture.entropies is not None:
        if capture.entropy_mask is not None:
            mask = mask * capture.entropy_mask
            num_tokens = (mask.sum() if cut is None else cut.num_tokens).clamp(min=1)
        mean = (capture.entropies * mask).sum() / mask.sum().clamp(min=1)
        rest = rest - entropy_coef * mean * (mask.sum() / num_tokens - weight)
    return rest


def metrics_of_step(
    recorded: Sequence[Mapping[str, list[float]]],
    parts: Sequence[MicroBatchSize],
    loss_type: str,
    importance_level: str,
) -> dict[str, float]:
    """One number for each metric of TRL: the largest of what is called max, the smallest min, the last of a setting, the sum of
    what is normalized by the step, and else the mean over all tokens or, where TRL has one number per completion, over all rows.

    Args:
        recorded: what each micro-batch added to TRL's metrics.
    """
    result = {}
    for name in dict.fromkeys(name for values in recorded for name in values):
        known = [
            (value, part)
            for values, part in zip(recorded, parts, strict=True)
            for value in values.get(name, [])
            if not math.isnan(value)
        ]
        if not known:
            continue
        numbers = [value for value, _ in known]
        weights: list[int] = [max(1, part.tokens) for _, part in known]
        if _is_per_row(name, loss_type, importance_level):
            weights = [part.rows for _, part in known]
        if name.endswith("max"):
            result[name] = max(numbers)
        elif name.endswith("min"):
            result[name] = min(numbers)
        elif name == "entropy_coef":
            result[name] = numbers[-1]
        elif name == "policy_loss" and loss_type in TOKEN_SUMS:
            result[name] = sum(numbers)
        else:
            result[name] = sum(v * w for v, w in zip(numbers, weights, strict=True)) / sum(weights)
    return result


def _is_per_row(name: str, loss_type: str, importance_level: str) -> bool:
    if name == "policy_loss":
        return loss_type != "bnpo"
    return name == "vespo/phi_seq_mean" or ("clip_ratio" in name and importance_level == "sequence")
