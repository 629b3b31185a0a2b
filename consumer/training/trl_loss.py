"""TRL's trainer with the loss of `consumer.loss`, over steps that are lists of micro-batches.

Guarantee: gradients, metrics and the adaptive entropy coefficient are those of the whole step, however it is cut. With one
update per batch the proximal policy is the current one, detached, so the importance factors come out of the loss's own forward
pass; with more, one pass per batch is added. What transformers takes for a batch is all of an optimizer step.

Private names of TRL 1.16.0 and transformers used here, each with a test in tests/contract: `_prepare_inputs`, `compute_loss`,
`_entropy_bonus_enabled`, `_last_world_entropy`, `_metrics`, `_get_grad_norm`, `_move_model_to_device`, and `fused_lm_head` of its
model.
"""

import contextlib
import functools
import math
import time
from typing import Any

import torch

from consumer.batches.tensors import MicroBatch, Places, loss_mask, on_device
from consumer.loss.forward import Layout, Tokens, is_packable, is_plain, is_shareable, lay_out, spread, token_logprobs
from consumer.loss.importance import Correction, importance_factors
from consumer.loss.lm_head import TokenLogprobs
from consumer.loss.ratio_statistics import ratio_statistics, ratio_values, samples_of
from consumer.loss.reference import ReferencePolicy
from consumer.loss.step_loss import (
    ACTING_ENTROPY,
    EntropyCut,
    NotFiniteStep,
    Pass,
    metrics_of_step,
    part_of_loss,
    values_of,
)
from consumer.loss.summary import Summary, merged, over_ranks, sampled
from consumer.ranks.exchange import CHECK_EVERY, Ranks, RankWork, check_agreement, work_of_all
from consumer.ranks.sharding import is_sharded, shard_base
from consumer.training.memory import given_up_together
from consumer.training.vision_language import drop_towers
from protocol.config.learning import ShardBase
from protocol.runtime.processes import hidden

with hidden("vllm"):
    from trl import GRPOTrainer
    from trl.kernels import ChunkedLogProbFunction

_VOCABULARY_CHUNK = 32768  # of TRL's kernel
_RATIO = "sampling/importance_sampling_ratio/"
_OF_LOSS = (
    *("completion_mask", "tool_mask", "sampling_per_token_logps", "advantages", "num_items_in_batch"),
    *("old_per_token_logps", "ref_per_token_logps"),
)
"""What the loss takes of a micro-batch."""


class StepLossTrainer(GRPOTrainer):
    """See the module's guarantee.

    Args:
        correction: of the importance ratios.
        ranks: that share the work of every step.
        shard: whether they share the base, too.
        options: of `trl.GRPOTrainer`.

    Attributes:
        works: of the last step, by rank; empty for one rank.
        step_numbers: metrics of the step in progress, by name, on rank 0; for whoever begins a step to clear.
    """

    entropy_coef: float

    def __init__(self, correction: Correction, ranks: Ranks, shard: ShardBase, **options: Any) -> None:
        self._ranks = ranks
        self._shard = shard
        super().__init__(**options)
        drop_towers(self._causal_model)
        self.works: list[RankWork] = []
        self._correction = correction
        self._step_loss, self._grad_norm = torch.zeros(()), math.nan
        self._summaries: list[Summary] = []  # of the micro-batches of the last step
        self.step_numbers: dict[str, float] = {}
        self._unlogged: dict[str, tuple[float, int]] = {}  # sum and number of values of each metric
        model = self._causal_model
        self._is_plain = is_plain(model) and not (self.args.cast_lm_head_to_fp32 or self.aux_loss_enabled)
        with self.accelerator.autocast():  # as in every later pass; some kernels take no float32
            self._packed = self._is_plain and is_packable(model)
        self._reference = ReferencePolicy(self._peft_model)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """transformers does it once, as soon as the adapter is there. A base that does not fit the device is spread before."""
        shard_base(self._shard, model.get_base_model(), self._ranks, device)
        super()._move_model_to_device(model, device)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the base only. Then every pass through the model is one of all ranks."""
        return is_sharded(self._causal_model)

    @property
    def _peft_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @property
    def _causal_model(self) -> Any:
        """The base model, with the adapter's layers in it."""
        return self._peft_model.get_base_model()

    def _prepare_inputs(self, generation_batch: list[MicroBatch]) -> list[MicroBatch]:
        """Adds the log-probs of fixed policies, computed once per batch and kept on the device for its iterations. The rest stays
        on the CPU until its pass."""
        for batch in generation_batch:
            with torch.no_grad():
                if self.num_iterations > 1 and "old_per_token_logps" not in batch:
                    batch["old_per_token_logps"] = self.forward_pass(batch).logprobs
                if self.args.beta != 0.0 and "ref_per_token_logps" not in batch:
                    with self._reference:
                        batch["ref_per_token_logps"] = self.forward_pass(batch).logprobs
        return generation_batch

    def compute_loss(
        self, model: Any, inputs: list[MicroBatch], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """This rank's part of the loss of a step. Its gradient is that of the last micro-batch; those of the others are there
        already."""
        state, cut = self.accelerator.gradient_state, None
        if self.top_entropy_quantile < 1.0 and (len(inputs) > 1 or self._ranks.world > 1):
            with torch.no_grad(), self._together():
                passes = [(batch, self.forward_pass(batch)) for batch in inputs]
            cut = self._entropy_cut(passes)
        total = torch.zeros((), device=self.accelerator.device)
        self._summaries = []
        try:
            for number, batch in enumerate(inputs, start=1):
                state._set_sync_gradients(number == len(inputs))
                loss = self._part_of_loss(batch, cut)
                if number < len(inputs):
                    self.accelerator.backward(loss)
                    loss = loss.detach()
                    self.callback_handler.on_substep_end(self.args, self.state, self.control)
                total = total + loss
        finally:
            state._set_sync_gradients(True)
        self._step_loss = total.detach()
        return total

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The loss of the whole step; its gradient is at the parameters afterwards.

        Raises:
            OutOfMemory: the device of a rank has no memory for one of its passes. Nothing of the step was noted.
        """
        if self._ranks.world == 1:
            with self._together():
                super().training_step(model, inputs, num_items_in_batch)
            self.note_step()
            return self._step_loss.clone()
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if self.state.global_step % CHECK_EVERY == 0:
            check_agreement(self._ranks, self.state.global_step, trained)
        began, waited_s = time.monotonic(), self._ranks.waited_s
        with self._together():
            super().training_step(model, inputs, num_items_in_batch)
        self.note_step()
        for parameter in trained.values():  # one that no row of this rank went through
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._ranks.add([self._step_loss, *(parameter.grad for parameter in trained.values())])
        step_s, waited_s = time.monotonic() - began, self._ranks.waited_s - waited_s
        num_tokens = sum(int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in inputs)
        self.works[:] = work_of_all(self._ranks, step_s, waited_s, num_tokens)
        return self._step_loss.clone()

    def _part_of_loss(self, batch: MicroBatch, cut: EntropyCut | None) -> torch.Tensor:
        found = self.forward_pass(batch)
        if self.top_entropy_quantile < 1.0 and cut is None:  # this is all of the step
            cut = self._entropy_cut([(batch, found)])
        num_tokens, places = int(batch["num_items_in_batch"]), Places.of(loss_mask(batch))
        tensors = {name: batch[name] for name in _OF_LOSS if name in batch} | places._asdict()
        batch = on_device(tensors, self.accelerator.device)
        places = Places(batch["tokens"], batch["rows"])
        current = found.logprobs.detach()
        factors = importance_factors(
            self._correction,
            current=current,
            proximal=batch.get("old_per_token_logps", current),
            behaviour=batch["sampling_per_token_logps"],
            advantages=batch["advantages"],
            mask=loss_mask(batch),
        )
        is_gated = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        loss, seen = part_of_loss(
            self.args, batch, found, factors, cut=cut,
            entropy_coef=0.0 if is_gated else self.entropy_coef, aux_loss_coef=self.router_aux_loss_coef,
        )  # fmt: skip
        ratios = ratio_values(self._correction, factors, places)
        of_tokens, of_rows = samples_of(self._correction)
        samples = sampled(ratios, of_tokens, num_tokens) | {name: ratios[name] for name in of_rows}
        values = {f"{_RATIO}{name}": each for name, each in ratios.items()}
        values |= values_of(seen, places, current.shape)
        self._summaries.append(Summary.of(values, samples))
        return loss

    def _entropy_cut(self, passes: list[tuple[MicroBatch, Pass]]) -> EntropyCut:
        device = self.accelerator.device
        entropies = [
            found.entropies.detach().flatten()[on_device(Places.of(loss_mask(batch))._asdict(), device)["tokens"]]
            for batch, found in passes
        ]
        of_step = self._ranks.gather({"entropies": torch.cat(entropies)})["entropies"]
        return EntropyCut.at(of_step.to(entropies[0]), 1 - self.top_entropy_quantile)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Around passes. Ranks that share the base cannot make them alone, so none of them can give one up."""
        return contextlib.nullcontext() if self.is_sharded else given_up_together(self._ranks)

    def note_step(self) -> None:
        """Records the metrics of the last step on rank 0, and moves the adaptive entropy coefficient on all ranks."""
        of_step, samples = over_ranks(merged(self._summaries), self._ranks)
        numbers = metrics_of_step({name: each for name, each in of_step.items() if not name.startswith(_RATIO)})
        entropy = numbers.pop(ACTING_ENTROPY, 0.0)
        if self.use_adaptive_entropy:
            if entropy <= self.args.entropy_target:
                self.entropy_coef = min(self.entropy_coef + self.args.entropy_coef_delta, self.args.entropy_coef_max)
            else:
                self.entropy_coef = max(self.entropy_coef - self.args.entropy_coef_delta, self.args.entropy_coef_min)
            self._last_world_entropy = entropy
        if self._entropy_bonus_enabled:
            numbers["entropy_coef"] = self.entropy_coef
        else:
            numbers.pop("policy_loss", None)  # it is the loss
        numbers |= {name: values[-1] for name, values in self._metrics["train"].items()}  # what TRL has measured
        self._metrics["train"].clear()
        if self._ranks.rank == 0:
            ratios = {name.removeprefix(_RATIO): each for name, each in of_step.items() if name.startswith(_RATIO)}
            statistics = ratio_statistics(self._correction, ratios, samples)
            numbers |= {f"{_RATIO}{name}": value for name, value in statistics.items()}
            for name, value in numbers.items():
                self.record_metric(name, value)

    def record_metric(self, name: str, value: float) -> None:
        """Adds a number to those of the step in progress, and to the means that the next log has."""
        self.step_numbers[name] = value
        total, count = self._unlogged.get(name, (0.0, 0))
        self._unlogged[name] = (total, count) if math.isnan(value) else (total + value, count + 1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs these and the means of all numbers since the last log, which TRL would keep one by one until then."""
        means = {name: [total / count if count else math.nan] for name, (total, count) in self._unlogged.items()}
        self._metrics["train"].update(means)
        self._unlogged.clear()
        super().log(logs, start_time)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        """transformers asks for it once per step, after the last backward pass and before the optimizer. A gradient that a
        scaler finds infinite is its own business: it skips the step and scales down."""
        norm = self._grad_norm = float(super()._get_grad_norm(model, grad_norm))
        loss = float(self._step_loss)
        has_scaler = self.accelerator.scaler is not None and self.accelerator.scaler.is_enabled()
        if not math.isfinite(loss) or not (math.isfinite(norm) or has_scaler):
            raise NotFiniteStep(loss, norm)
        return norm

    def forward_pass(self, batch: MicroBatch) -> Pass:
        """Of the present policy; 0 for tokens outside the loss."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        layout = lay_out(
            Tokens(ids, mask, loss_mask(batch)), packed=self._packed, shareable=self._is_plain and self._is_shareable
        )
        layout = layout._replace(**on_device(layout.tensors, self.accelerator.device))
        with self.accelerator.autocast():
            if self._is_plain:
                return Pass(*token_logprobs(self._causal_model, layout, self._head))
            return self._pass_by_trl(layout)

    def _pass_by_trl(self, layout: Layout) -> Pass:
        """With the LM head that TRL gave the model, which knows the logits of models that are not plain."""
        labels = torch.full_like(layout.ids, -100).flatten()
        labels = labels.index_put((layout.before + 1,), layout.targets).view(layout.ids.shape)
        options = {"attention_mask": layout.mask, "output_router_logits": True} if self.aux_loss_enabled else {}
        found = self.model(input_ids=layout.ids, labels=labels, fused_lm_head=True, **options)
        logprobs, entropies = (
            spread(torch.nn.functional.pad(values, (0, 1)).flatten()[layout.before], layout)
            for values in (found.log_probs, found.entropy)
        )
        return Pass(logprobs, entropies, found.aux_loss if self.aux_loss_enabled else None)

    @functools.cached_property
    def _is_shareable(self) -> bool:
        """Asked at the first pass, when transformers has switched gradient checkpointing on."""
        return is_shareable(self._causal_model)

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
