"""The loss of a step: TRL's loss of each micro-batch, with our log-probs and importance factors, put together again.

Guarantee: the loss itself and its metrics are TRL's own. This module only says how log-probs are computed, when those of fixed
policies are, what the importance factors are, that the bias-corrected KL carries them too, and what a micro-batch is worth in
its step. With one update per batch the proximal policy is the current one, detached, so the factors come out of the loss's own
forward pass; with more, one pass per batch is added.

What transformers takes for a batch is all of an optimizer step, a list of micro-batches, so that their number may vary.

Private names of TRL 1.16.0 and transformers used here, each with a test in tests/contract: `_prepare_inputs`,
`compute_loss`, `_compute_loss`, `_get_per_token_logps_and_entropies`, `get_high_entropy_mask`, `_entropy_bonus_enabled`,
`_last_world_entropy`, `_metrics`, `vllm_importance_sampling_correction`, `_get_grad_norm`.
"""

import math
from collections import defaultdict
from typing import Any

import torch

from consumer.batches.tensors import MicroBatch, loss_mask
from consumer.loss.forward import Tokens, is_packable, is_plain, token_logprobs
from consumer.loss.importance import Correction, Factors, importance_factors, joined
from consumer.loss.kl import aggregate, missing_kl
from consumer.loss.lm_head import TokenLogprobs
from consumer.loss.ratio_statistics import ratio_statistics
from consumer.loss.reference import ReferencePolicy
from consumer.loss.step_loss import (
    EntropyCut,
    LossCapture,
    MicroBatchSize,
    NotFiniteStep,
    means_over_tokens,
    metrics_of_step,
    share_of_step,
)
from consumer.training.import_guard import without_vllm

with without_vllm():
    from trl import GRPOTrainer
    from trl.kernels import ChunkedLogProbFunction

_VOCABULARY_CHUNK = 32768  # of TRL's kernel


class StepLossTrainer(GRPOTrainer):
    """See the module's guarantee.

    Args:
        correction: of the importance ratios.
        num_completions: of a full step.
        options: of `trl.GRPOTrainer`.
    """

    def __init__(self, correction: Correction, num_completions: int, **options: Any) -> None:
        super().__init__(**options)
        self._correction = correction
        self._num_completions = num_completions
        # The loss multiplies by `importance_sampling_ratio` when both flags are set. Set here, not in the arguments,
        # where `use_vllm` would start an engine.
        self.use_vllm = True
        self.vllm_importance_sampling_correction = correction.is_active
        self._capture: LossCapture | None = None
        self._factors: list[Factors] = []
        self._share = 1.0  # of a micro-batch in its step
        self._step_loss = torch.zeros(())
        self._entropy_cut: EntropyCut | None = None
        model = self._causal_model
        self._is_plain = is_plain(model) and not (self.args.cast_lm_head_to_fp32 or self.aux_loss_enabled)
        with self.accelerator.autocast():  # as in every later pass; some kernels take no float32
            self._packed = self._is_plain and is_packable(model)
        self._reference = ReferencePolicy(self._peft_model)

    @property
    def _peft_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @property
    def _causal_model(self) -> Any:
        """The base model, with the adapter's layers in it."""
        return self._peft_model.get_base_model()

    def _prepare_inputs(self, generation_batch: list[MicroBatch]) -> list[MicroBatch]:
        """To the device, with the log-probs of fixed policies, computed once per batch and kept for its iterations."""
        for batch in generation_batch:
            batch.update({name: tensor.to(self.accelerator.device) for name, tensor in batch.items()})
            if self.num_iterations > 1 and "old_per_token_logps" not in batch:
                batch["old_per_token_logps"] = self._without_gradient(batch)[0]
            if self.beta != 0.0 and "ref_per_token_logps" not in batch:
                with self._reference:
                    batch["ref_per_token_logps"] = self._without_gradient(batch)[0]
        self._entropy_cut = self._quantile_of_entropies(generation_batch)
        return [dict(batch) for batch in generation_batch]  # the loss leaves its ratio there

    def _quantile_of_entropies(self, batches: list[MicroBatch]) -> EntropyCut | None:
        """Where `top_entropy_quantile` cuts, over all tokens of the step; None where TRL sees them all at once."""
        if self.top_entropy_quantile == 1.0 or len(batches) == 1:
            return None
        each = [self._without_gradient(batch)[1][loss_mask(batch).bool()] for batch in batches]
        return EntropyCut.at(torch.cat(each), 1 - self.top_entropy_quantile)

    def _without_gradient(self, inputs: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies."""
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            logprobs, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                input_ids,
                attention_mask,
                inputs["completion_ids"].size(1),
                loss_mask=loss_mask(inputs),
                compute_entropy=True,
            )
        return logprobs, entropies

    def compute_loss(
        self, model: Any, inputs: list[MicroBatch], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of a step. Its gradient is that of the last micro-batch; those of the others are there already."""
        sizes = [MicroBatchSize(len(batch["advantages"]), int(loss_mask(batch).sum())) for batch in inputs]
        state, metrics = self.accelerator.gradient_state, self._metrics["train"]
        num_tokens = int(inputs[0]["num_items_in_batch"])  # of the whole step
        total, recorded, self._factors = torch.zeros((), device=self.accelerator.device), [], []
        try:
            for number, (batch, size) in enumerate(zip(inputs, sizes, strict=True), start=1):
                self._metrics["train"] = defaultdict(list)
                state._set_sync_gradients(number == len(inputs))
                self._share = share_of_step(self.loss_type, size, self._num_completions, num_tokens)
                loss = self._compute_loss(model, batch)
                if number < len(inputs):
                    self.accelerator.backward(loss)
                    loss = loss.detach()
                    self.callback_handler.on_substep_end(self.args, self.state, self.control)
                total = total + loss
                recorded.append(self._metrics["train"])
        finally:
            self._metrics["train"], self._share = metrics, 1.0
            state._set_sync_gradients(True)
        for name, value in metrics_of_step(recorded, sizes, self.loss_type, self.importance_sampling_level).items():
            metrics[name].append(value)
        for name, value in ratio_statistics(self._correction, joined(self._factors)).items():
            metrics[f"sampling/importance_sampling_ratio/{name}"].append(value)
        self._step_loss = total.detach()
        return total

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        """transformers asks for it once per step, after the last backward pass and before the optimizer. A gradient that a
        scaler finds infinite is its own business: it skips the step and scales down."""
        norm = float(super()._get_grad_norm(model, grad_norm))
        loss = float(self._step_loss)
        has_scaler = self.accelerator.scaler is not None and self.accelerator.scaler.is_enabled()
        if not math.isfinite(loss) or not (math.isfinite(norm) or has_scaler):
            raise NotFiniteStep(loss, norm)
        return norm

    def _compute_loss(self, model: Any, inputs: MicroBatch) -> torch.Tensor:
        """The loss of a micro-batch, as its share of the step's."""
        self._capture = capture = LossCapture(inputs)
        gated = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        bonus = 0.0 if gated else self.entropy_coef  # before TRL adapts it for the next step
        try:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        finally:
            self._capture = None
        if capture.missing_kl is not None:
            loss = loss + capture.missing_kl
        loss = self._share * loss
        if capture.aux_loss is None and not self._entropy_bonus_enabled:
            return loss
        return loss + means_over_tokens(
            capture, self._share, self._entropy_cut, entropy_coef=bonus, aux_loss_coef=self.router_aux_loss_coef
        )

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        if self._entropy_cut is None:
            result: torch.Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        else:
            result = (entropies >= self._entropy_cut.threshold) & mask.bool()
        if self._capture is not None:
            self._capture.entropy_mask = result
        return result

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        loss_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any, Any]:
        if self._capture is not None:
            loss_mask = self._capture.loss_mask
        tokens = Tokens(input_ids, attention_mask, logits_to_keep, loss_mask)
        if self._is_plain and tokens.in_loss.any():
            with self.accelerator.autocast():
                result = (*token_logprobs(self._causal_model, tokens, self._head, packed=self._packed), None)
        else:
            result = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
        if self._capture is not None:
            _, self._capture.entropies, self._capture.aux_loss = result
            self._correct(self._capture, result[0])
        return result

    def _head(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """TRL's kernel where Triton runs, ours elsewhere."""
        if not hidden.is_cuda:
            bonus = self._entropy_bonus_enabled
            logprobs, entropies = TokenLogprobs.apply(hidden, weight, bias, targets, self.temperature, bonus)
            return logprobs, entropies
        logprobs, entropies, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, self.temperature, _VOCABULARY_CHUNK, None, 1.0, ("log_probs", "entropy")
        )
        return logprobs, entropies

    def _correct(self, capture: LossCapture, current: torch.Tensor) -> None:
        """Puts the importance factors where TRL's loss looks for them, and what its KL term lacks into the capture."""
        inputs, mask = capture.inputs, capture.loss_mask
        proximal = inputs.get("old_per_token_logps", current.detach())
        factors = importance_factors(
            self._correction,
            current=current,
            proximal=proximal,
            behaviour=inputs["sampling_per_token_logps"],
            advantages=inputs["advantages"],
            mask=mask,
        )
        self._factors.append(factors)
        if self._correction.is_active:
            inputs["importance_sampling_ratio"] = factors.policy
        if self.beta != 0.0 and self.args.use_bias_correction_kl and self._correction.level != "none":
            reference, level = inputs["ref_per_token_logps"], self.importance_sampling_level
            capture.missing_kl = self.beta * aggregate(
                missing_kl(current, proximal, reference, factors.kl, mask, level=level),
                mask,
                self.loss_type,
                num_items=inputs["num_items_in_batch"],
                max_completion_length=self.max_completion_length,
            )
