"""The loss of an optimizer step, micro-batch by micro-batch, its metrics, and the reference policy.

Guarantee: however a step is split, the losses of its micro-batches add up to TRL 1.16.0's loss of all rows in one micro-batch.
So do the gradients, for every loss type and option. Missing rows of a batch that is not full count as rows without advantage.
Two things differ from TRL. The bias-corrected KL term carries p / b beside π / p, because its tokens came from b: its gradient is
that of the reverse KL. The experts' load-balancing loss is a mean over the tokens of the step.

Symbols as in `consumer.learn.importance`; log-probs are (B, T). Options and metrics have the names of `trl.GRPOConfig` and TRL.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor

from consumer.learn.importance import Factors
from consumer.learn.micro_batches import MicroBatch, Places, loss_mask, on_device
from consumer.learn.shards import spreads_weights
from consumer.learn.statistics import Numbers, Values
from consumer.ranks.exchange import Ranks
from replay.batch_selection import LOSS_PARTS

ACTING_ENTROPY = "entropy of the tokens that the loss acts on"
_TOKEN_MEANS = ("bnpo", "dapo", "cispo", "vespo")  # over the tokens of the step; the others are over its rows
_ENTROPY_FILE = "entropy_ctrl_state.json"  # as TRL calls it
_LOG_MIN, _LOG_MAX = math.log(1e-8), 20.0  # of VESPO's ratios

Seen = dict[str, torch.Tensor]
"""The values that metrics are made of, by their names: (B, T), or one of each row, (B,) or (B, 1), or one of all, (1,)."""


class NotFiniteStep(Exception):  # noqa: N818  the loop decides what follows
    """Loss or gradient of the step in progress is NaN or infinite; weights and optimizer are as before it."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss:g}, gradient norm {grad_norm:g}")
        self.loss = loss
        self.grad_norm = grad_norm


class Pass(NamedTuple):
    """The result of a forward pass over a micro-batch."""

    logprobs: torch.Tensor  # (B, T)
    entropies: torch.Tensor  # (B, T)
    divergences: torch.Tensor | None = None  # (B, T), from a teacher
    aux_loss: torch.Tensor | None = None  # (), load-balancing loss of experts


class EntropyThreshold(NamedTuple):
    """The entropy from which on `top_entropy_quantile` leaves a token of a step in the loss."""

    entropy: torch.Tensor | float
    num_tokens: torch.Tensor

    @classmethod
    def of_passes(cls, passes: Sequence[tuple[MicroBatch, Pass]], top: float, ranks: Ranks) -> "EntropyThreshold":
        """Make it from the passes of all ranks over a step, of which the share `top` stays in the loss. All ranks call it."""
        entropies = []
        for batch, found in passes:
            places = on_device(Places.of(loss_mask(batch))._asdict(), found.entropies.device)
            entropies.append(found.entropies.detach().flatten()[places["tokens"]])
        of_step = ranks.gather({"entropies": torch.cat(entropies)})["entropies"]
        return cls.at(of_step.to(entropies[0]), 1 - top)

    @classmethod
    def at(cls, entropies: torch.Tensor, quantile: float) -> "EntropyThreshold":
        """Make it from the entropies (N,) of all tokens in the loss of the step."""
        if not len(entropies):
            return cls(math.inf, entropies.new_zeros(()))
        values = entropies.to(torch.promote_types(entropies.dtype, torch.float32))
        place = round(quantile * (len(values) - 1), 6)
        below, above = (values.kthvalue(number + 1).values for number in (math.floor(place), math.ceil(place)))
        threshold = below.lerp(above, place % 1)  # as `torch.quantile`, which takes no more than 2^24 values
        return cls(threshold, (entropies >= threshold).sum())


def part_of_loss(
    options: Any,
    batch: MicroBatch,
    found: Pass,
    factors: Factors,
    *,
    threshold: EntropyThreshold | None = None,
    entropy_coef: float = 0.0,
    aux_loss_coef: float = 0.0,
    teacher_coef: float = 0.0,
    answer_coef: float = 0.0,
) -> tuple[torch.Tensor, Seen]:
    """Return the part of a micro-batch in the loss of its step, and the values that metrics are made of."""
    mask, num_tokens = loss_mask(batch), of_full_step(batch, batch["num_items_in_batch"])
    acting, num_acting = mask, num_tokens
    if threshold is not None:
        acting = mask * (found.entropies >= threshold.entropy)
        num_acting = of_full_step(batch, threshold.num_tokens)
    current = found.logprobs.masked_fill(mask == 0, 0.0)  # 0 for answers, too
    losses, seen = policy_losses(options, batch, current, factors)
    if "teacher_advantages" in batch:
        seen["distillation/logprob_gain"] = batch["teacher_advantages"]
        if found.divergences is None:
            losses = losses + teacher_coef * _weights(batch, "teacher") * distillation_losses(batch, current, factors)
    losses = losses * acting
    if options.beta != 0.0:
        seen["kl"] = kl = reference_kl(options, batch, current)
        losses = losses + options.beta * (kl * factors.kl if options.use_bias_correction_kl else kl)
    loss = aggregate(options, losses * mask, mask, num_tokens)
    if found.divergences is not None:
        seen["distillation/divergence"] = found.divergences
        weighted = found.divergences * factors.policy * mask * _weights(batch, "teacher")
        loss = loss + teacher_coef * weighted.sum() / num_tokens
    seen["policy_loss"] = loss[None]
    seen |= {"entropy": found.entropies, ACTING_ENTROPY: found.entropies.masked_fill(acting == 0, torch.nan)}
    if entropy_coef:
        loss = loss - entropy_coef * (found.entropies * acting).sum() / num_acting
    if found.aux_loss is not None:
        seen["aux_loss"] = found.aux_loss.expand(mask.shape)
        loss = loss + aux_loss_coef * found.aux_loss * mask.sum() / num_tokens
    if "answer_mask" in batch:
        nats = -found.logprobs.masked_fill(batch["answer_mask"] == 0, 0.0)
        loss = loss + answer_coef * (nats * _weights(batch, "answer")).sum() / of_full_step(
            batch, batch["num_answer_tokens"]
        )
        seen["ce_loss"] = nats.masked_fill(batch["answer_mask"] == 0, torch.nan).flatten()
    return loss, {name: values.detach() for name, values in seen.items()}


def of_full_step(batch: MicroBatch, num_tokens: torch.Tensor) -> torch.Tensor:
    """Return how many tokens a full step of such groups would have, at least 1. So a group moves the policy as much in a small
    step as in a full one, whatever the loss."""
    num_tokens = num_tokens.clamp(min=1)
    return num_tokens / batch["filled_share"] if "filled_share" in batch else num_tokens


def values_of(seen: Seen, places: Places, shape: torch.Size) -> Values:
    """Return the values of tokens in the loss, of rows, or of all.

    Args:
        shape: (B, T).
    """
    return {
        name: values.flatten()[places.tokens] if values.shape == shape else values.flatten()
        for name, values in seen.items()
    }


def policy_losses(
    options: Any, batch: MicroBatch, current: torch.Tensor, factors: Factors
) -> tuple[torch.Tensor, Seen]:
    """Return losses (B, T), or (B, 1) where all tokens of a completion share one."""
    mask, advantages = loss_mask(batch), _reward_advantages(batch)
    log_ratio = current - _proximal(batch, current)
    ratio = _level_ratio(options, log_ratio, mask)
    low, high = options.epsilon, options.epsilon if options.epsilon_high is None else options.epsilon_high
    factor, seen = factors.policy, Seen()
    match options.loss_type:
        case "cispo":
            losses = -ratio.clamp(max=high).detach() * advantages * current
            seen["cispo_clip_ratio"] = (ratio > high) & (advantages > 0)
        case "sapo":
            slope = torch.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
            losses = -4 / slope * torch.sigmoid(slope * (ratio - 1)) * advantages
        case "vespo":
            phi = _vespo_weights(options, advantages, log_ratio * mask, factor)
            seen["vespo/phi_seq_mean"] = phi.masked_fill(~mask.any(-1, keepdim=True), torch.nan)
            losses, factor = -phi * advantages * current, torch.ones_like(factor)
        case _:
            clipped = ratio.clamp(1 - low, 1 + high)
            ratio = ratio.clamp(max=math.inf if options.delta is None else options.delta)
            losses = -torch.min(ratio * advantages, clipped * advantages)
            is_low, is_high = (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
            for name, values in (("low", is_low), ("high", is_high), ("region", is_low | is_high)):
                seen[f"clip_ratio/{name}_mean"] = values
            seen |= {"clip_ratio/low_min": _row_means(is_low, mask), "clip_ratio/high_max": _row_means(is_high, mask)}
    if options.off_policy_mask_threshold is not None:  # DeepSeek-V3.2, arXiv:2512.02556
        divergence = (batch["sampling_per_token_logps"] - current.detach()).nan_to_num(nan=0.0) * mask
        mean = divergence.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        losses = losses * ((advantages >= 0) | (mean <= options.off_policy_mask_threshold))
    return losses * factor, seen


def distillation_losses(batch: MicroBatch, current: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Return -π / p (log p_T - log p_S) of each token, times its factor: (B, T). Nothing clips the ratio."""
    return -(current - _proximal(batch, current)).exp() * batch["teacher_advantages"] * factors.policy


def token_advantages(batch: MicroBatch, teacher_coef: float) -> torch.Tensor:
    """Return the advantages by which the policy loss moves tokens, of rewards and of teachers together: (B, T), or (B, 1) where
    there are no teachers and all tokens of a completion share one. `teacher_coef` is 0 where a divergence teaches."""
    result = _reward_advantages(batch)
    if "teacher_advantages" not in batch:
        return result
    return result + teacher_coef * _weights(batch, "teacher") * batch["teacher_advantages"]


def _reward_advantages(batch: MicroBatch) -> torch.Tensor:
    """Return the weighted advantages of rewards, (B, T) or (B, 1); the policy loss is proportional to them."""
    return batch["advantages"].view(len(batch["advantages"]), -1) * _weights(batch, "rewards")


def _weights(batch: MicroBatch, part: str) -> torch.Tensor | float:
    """Return the weights (B, 1) of the rows in one of LOSS_PARTS, or 1 for all."""
    if "loss_weights" not in batch:
        return 1.0
    number = LOSS_PARTS.index(part)
    return batch["loss_weights"][:, number : number + 1]


def reference_kl(options: Any, batch: MicroBatch, current: torch.Tensor) -> torch.Tensor:
    """Return k3 of KL(π ‖ ref) per token, ref / π - log(ref / π) - 1 (http://joschu.net/blog/kl-approx.html), times π / p with
    `use_bias_correction_kl` (DeepSeek-V3.2). Gradients flow through π in both."""
    log_ratio = batch["ref_per_token_logps"] - current
    kl = log_ratio.exp() - log_ratio - 1
    if options.use_bias_correction_kl:
        kl = kl * _level_ratio(options, current - _proximal(batch, current), loss_mask(batch))
    return kl


def aggregate(options: Any, losses: torch.Tensor, mask: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Return the part of the losses of tokens (B, T) in the loss of a step. A row is a record: an episode may have several.

        bnpo, dapo, cispo, vespo   sum / tokens of a full step (`of_full_step`)
        grpo, sapo                 sum over rows of the mean over tokens / completions of a full step
        dr_grpo                    sum / (max_completion_length · completions of a full step)
        luspo                      sum / completions of a full step

    Args:
        num_tokens: in the loss of a full step, at least 1.
    """
    if options.loss_type in _TOKEN_MEANS:
        return losses.sum() / num_tokens
    rows = losses.sum(-1)
    if options.loss_type in ("grpo", "sapo"):
        rows = rows / mask.sum(-1).clamp(min=1)
    elif options.loss_type == "dr_grpo":
        rows = rows / options.max_completion_length
    return rows.sum() / options.per_device_train_batch_size


def metrics_of_step(numbers: Mapping[str, Numbers]) -> dict[str, float]:
    """Return the metrics: `*_min` minimum, `*_max` maximum, `policy_loss` sum, others mean. Those without values are dropped."""
    known = {name: each for name, each in numbers.items() if each.num_values}
    return {name: _metric(name, each) for name, each in known.items()}


def _metric(name: str, numbers: Numbers) -> float:
    if name.endswith("min"):
        return numbers.least
    if name.endswith("max"):
        return numbers.greatest
    return numbers.total if name == "policy_loss" else numbers.mean


def _proximal(batch: MicroBatch, current: torch.Tensor) -> torch.Tensor:
    return batch.get("old_per_token_logps", current.detach())


def _level_ratio(options: Any, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the ratios of tokens, (B, T), or their geometric mean over a completion, (B, 1)."""
    if options.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def _vespo_weights(
    options: Any, advantages: torch.Tensor, log_ratio: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """Return φ(w) = e^(λ - λ w) w^k, (B, 1), of the product w of a completion's π / b; 1 at w = 1."""
    log_w = log_ratio.detach().clamp(-_LOG_MAX, _LOG_MAX).sum(-1, keepdim=True)
    log_w = (log_w + factor.log().clamp(_LOG_MIN, _LOG_MAX).sum(-1, keepdim=True)).clamp(_LOG_MIN, _LOG_MAX)
    is_good = advantages >= 0
    k = torch.where(is_good, options.vespo_k_pos, options.vespo_k_neg)
    slope = torch.where(is_good, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4)
    return (slope + k * log_w - slope * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _row_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return means (B,), NaN for a row without tokens in the loss."""
    return (values * mask).sum(-1) / mask.sum(-1)


class EntropyBonus:
    """The weight of the policy's entropy in the loss, which `use_adaptive_entropy` moves after each step as TRL does.

    Attributes:
        coef: the weight now.
        is_on: whether it can be another than 0 in this run.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self.coef = options.entropy_coef
        self.is_on = self.coef != 0.0 or options.use_adaptive_entropy
        self._last_entropy = math.inf  # of a whole step; no bonus before the first

    @property
    def acting_coef(self) -> float:
        """The weight in the step in progress; 0 while the entropy is above its target."""
        is_gated = self._options.use_adaptive_entropy and self._last_entropy > self._options.entropy_target
        return 0.0 if is_gated else self.coef

    def adapt(self, entropy: float) -> None:
        """Take a step's entropy into account."""
        options = self._options
        if options.use_adaptive_entropy:
            if entropy <= options.entropy_target:
                self.coef = min(self.coef + options.entropy_coef_delta, options.entropy_coef_max)
            else:
                self.coef = max(self.coef - options.entropy_coef_delta, options.entropy_coef_min)
            self._last_entropy = entropy

    def save(self, folder: Path) -> None:
        """Write its state beside a checkpoint."""
        if self._options.use_adaptive_entropy:
            began = {"began_with": self._options.entropy_coef}
            state = began | {"entropy_coef": self.coef, "last_world_entropy": self._last_entropy}
            (folder / _ENTROPY_FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read the state beside a checkpoint. A weight that was given anew holds."""
        if self._options.use_adaptive_entropy and (folder / _ENTROPY_FILE).is_file():
            state = json.loads((folder / _ENTROPY_FILE).read_text(encoding="utf-8"))
            self._last_entropy = state["last_world_entropy"]
            if state["began_with"] == self._options.entropy_coef:
                self.coef = state["entropy_coef"]


class ReferencePolicy:
    """The policy that the KL term is measured from: the base model, or the adapter that a run started from, also one that
    began with a part of the base (PiSSA). Where the weights themselves train, it keeps those of now; of linear layers as autocast
    to bfloat16 rounds them in each pass, but of a head that computes in float32.

    A context for forward passes without a gradient: inside, the model computes as its reference policy; afterwards as before,
    with the very same parameters.

    Args:
        model: whose adapter `default` is trained.
        tensors: of the adapter to compute with; None: without an adapter.
        options: the run's GRPOConfig, if the weights themselves train and there is a KL term.
    """

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor] | None = None, options: Any = None) -> None:
        self._model = model
        self._pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        if options is not None:
            casts = options.bf16 and not spreads_weights(model)  # whose parts keep their type
            cast = {module.weight for module in model.modules() if casts and isinstance(module, torch.nn.Linear)}
            cast.discard(model.get_input_embeddings().weight)
            if options.cast_lm_head_to_fp32:
                cast.discard(model.get_output_embeddings().weight)
            trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
            self._pairs = [
                (each, each.detach().to(torch.bfloat16 if each in cast else each.dtype, copy=True)) for each in trained
            ]
        if tensors is not None:
            by_address = {parameter.data_ptr(): parameter for parameter in model.parameters()}
            for name, tensor in get_peft_model_state_dict(model, adapter_name="default").items():
                parameter = by_address[tensor.data_ptr()]
                self._pairs.append((parameter, tensors[name].to(parameter.device, parameter.dtype, copy=True)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that it keeps beside the model's."""
        return [tensor for _, tensor in self._pairs]

    def __enter__(self) -> None:
        if self._pairs:
            self._exchange()
        else:
            self._disabled = self._model.disable_adapter()
            self._disabled.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pairs:
            self._exchange()
        else:
            self._disabled.__exit__(kind, error, trace)

    def _exchange(self) -> None:
        """Let the storage of the parameters and of ours change places."""
        for number, (parameter, other) in enumerate(self._pairs):
            if isinstance(parameter, DTensor):  # FSDP2 gathers from the storage that it knows
                part, parts = parameter.to_local().detach(), other.to_local()
                kept = part.clone()
                part.copy_(parts)
                parts.copy_(kept)
            else:
                parameter.data, self._pairs[number] = other, (parameter, parameter.data)
