"""The trainer: `transformers.Trainer` with the options of `trl.GRPOConfig`, over groups that were generated elsewhere.

Guarantee: callbacks, checkpoints and every option of `trl.GRPOConfig` that is neither generation nor the loss are those of
transformers and TRL. Gradients, metrics and the adaptive entropy coefficient are those of the whole step, however it is split
into micro-batches. With one update per batch the proximal policy is the current one, detached, so the importance factors come out
of the loss's own forward pass; with more, one pass per batch is added. It knows no socket and no journal.

A batch of transformers is a list of micro-batches here: all of an optimizer step. What is private in transformers and TRL 1.16.0
and used here has a test in tests/contract.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model_state_dict
from transformers import PrinterCallback, Trainer

from consumer.learn import checkpoints
from consumer.learn.adapters import AdapterFolder
from consumer.learn.checkpoint_settings import present_settings
from consumer.learn.completions import log_completions
from consumer.learn.cut_batch import CutBatch
from consumer.learn.forward import Tokens
from consumer.learn.importance import importance_factors, resolve
from consumer.learn.loss import (
    ACTING_ENTROPY,
    EntropyBonus,
    EntropyThreshold,
    NotFiniteStep,
    Pass,
    ReferencePolicy,
    metrics_of_step,
    part_of_loss,
    token_advantages,
    values_of,
)
from consumer.learn.memory import OutOfMemory, PassMemory, PassSize, oom_on_all_ranks, random_state, set_random_state
from consumer.learn.micro_batches import (
    BatchRecipe,
    MicroBatch,
    Places,
    Recorded,
    StepSplitter,
    loss_mask,
    on_device,
    scored_mask,
)
from consumer.learn.model import base_model, is_sharded, load_policy, router_loss_coef, save_weights
from consumer.learn.options import checkpoints_by_memory
from consumer.learn.recomputation import RecomputedLayers
from consumer.learn.row_passes import RowPasses
from consumer.learn.shards import load_weights, share_state, spreads_weights
from consumer.learn.statistics import (
    Summary,
    TrainedStep,
    merged,
    over_ranks,
    ratio_statistics,
    ratio_values,
    sampled,
    samples_of,
)
from consumer.link.merging import load_beginning
from consumer.link.weight_snapshots import whole
from consumer.prompts.tokenizer import load_tokenizer
from consumer.ranks.exchange import (
    ALONE,
    CHECK_EVERY,
    Gather,
    GatheredState,
    Ranks,
    RankWork,
    Train,
    check_agreement,
    steps_of,
    work_of_all,
)
from protocol.config.run import RunConfig
from replay.batch_selection import TrainingBatch
from replay.groups import RolloutGroup
from replay.journal.schema import MicroBatchPlan
from replay.rewards import RewardRecipe

_RATIO = "sampling/importance_sampling_ratio/"
_OF_LOSS = (
    *("completion_mask", "tool_mask", "sampling_per_token_logps", "advantages", "loss_weights"),
    *("num_items_in_batch", "filled_share"),
    *("old_per_token_logps", "ref_per_token_logps", "teacher_advantages", "answer_mask", "num_answer_tokens"),
)
"""The tensors of a micro-batch that the loss takes."""


class SlipstreamTrainer(Trainer):
    """Takes optimizer steps over batches of groups.

    Args:
        options: the run's GRPOConfig.
        batches: iterating it yields the groups of the next optimizer steps, and blocks while there are none.
        commit_checkpoint: is called with the step, the folder that transformers will write to and the call that writes.
        ranks: that share the work of every step.
        recorded: how steps were split before.

    Attributes:
        last: the last step; None before the first.
        works: of the last step, by rank; empty for one rank.
    """

    def __init__(
        self,
        config: RunConfig,
        options: Any,
        lora: LoraConfig | None,
        model_folder: Path,
        batches: Iterable[TrainingBatch],
        commit_checkpoint: Callable[[int, Path, Callable[[], None]], None],
        ranks: Ranks = ALONE,
        recorded: Recorded = lambda step: None,
    ) -> None:
        sides = {"padding_side": "left", "truncation_side": "left"}
        tokenizer = load_tokenizer(model_folder, trust_remote_code=options.trust_remote_code, **sides)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        model = load_policy(config, options, lora, model_folder, ranks, pad_token_id=tokenizer.pad_token_id)
        super().__init__(model=model, args=options, data_collator=list, processing_class=tokenizer)
        self.remove_callback(PrinterCallback)  # the progress report shows the same numbers in one line
        self.args.save_total_limit = None  # transformers would delete before the new one is committed
        self._batches, self._commit_checkpoint, self._ranks = batches, commit_checkpoint, ranks
        self._correction = resolve(config.correction)
        self._entropy_bonus = EntropyBonus(options)
        self._teacher_coef = 0.0 if config.distillation is None else config.distillation.coef
        self._answer_coef = config.loss.ce_coef
        self._router_loss_coef = router_loss_coef(options, self.base)
        self.row_passes = RowPasses(
            self.base, config, options, self._router_loss_coef, ranks, self.accelerator.autocast
        )
        self._recomputed = RecomputedLayers(model, options, ranks, by_memory=checkpoints_by_memory(config))
        has_kl = options.beta != 0.0
        tensors = get_peft_model_state_dict(model) if has_kl and config.changes_base else None
        self._reference = ReferencePolicy(model, tensors, options if has_kl and lora is None else None)
        self._splitter = StepSplitter(config.pipeline.trainer_tokens_per_micro_batch, ranks, recorded)
        self.reward_names = config.reward_names
        self.recipe = self._recipe(config)
        is_here = self.base.get_input_embeddings().weight.device.type == self.accelerator.device.type
        if is_here and not self.is_sharded:
            self._choose_passes()
        self.last: TrainedStep | None = None
        self.works: list[RankWork] = []
        self._step_loss = torch.zeros(())
        self._summaries: list[Summary] = []  # of the micro-batches of the step in progress
        self._passes: list[PassSize] = []  # of the step in progress, by which its gradient is made
        self._unlogged: dict[str, tuple[float, int]] = {}  # sum and number of values of each metric
        self._newest_groups: list[RolloutGroup] = []
        self._cut_batch, self._is_cut = CutBatch(ranks), False  # by `max_steps`

    def _recipe(self, config: RunConfig) -> BatchRecipe:
        options, bonus = self.args, self._entropy_bonus
        return BatchRecipe(
            rewards=RewardRecipe.of(config, options.multi_objective_aggregation, options.scale_rewards),
            num_generations=config.sampling.num_generations,
            groups_per_step=config.pipeline.groups_per_step,
            max_tokens=self._splitter.tokens,
            tree=False,
            only_advantages=options.beta == 0.0 and not bonus.is_on and options.top_entropy_quantile == 1.0,
            keeps_all_rows=self._router_loss_coef != 0.0,
            pad_token_id=self.processing_class.pad_token_id,
            mask_truncated=options.mask_truncated_completions,
            seed=config.seed,
            rank=self._ranks.rank,
            world=self._ranks.world,
            in_step=self.is_sharded,
        )

    @property
    def base(self) -> Any:
        """The base model, with the adapter's layers in it."""
        return base_model(self.model)

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank has a part of the base only. Then every pass through the model is one of all ranks."""
        return is_sharded(self.base)

    @property
    def spreads_weights(self) -> bool:
        """Return whether each rank has a part of what trains, too."""
        return spreads_weights(self.base)

    def gather(self, what: GatheredState) -> None:
        """Prepare, on rank 0, for the next `state_dict` of model or optimizer, which the other ranks make with it."""
        if self.spreads_weights:
            self._ranks.share(Gather(what))

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if self.spreads_weights:
            share_state(optimizer, keeps=self._ranks.rank == 0)
        return optimizer

    def start_from(self, adapter: AdapterFolder, *, resumed: bool) -> None:
        """Make the adapter the reference policy, and the policy unless a checkpoint has one."""
        if not resumed:
            adapter.load_into(self.model)
        if self.args.beta != 0.0:
            self._reference = ReferencePolicy(self.model, adapter.tensors)

    def begin_from(self, checkpoint: Path) -> None:
        """Let the adapter begin with that part of the base with which it began in the run of this checkpoint."""
        load_beginning(self.model, checkpoint)
        if self.args.beta != 0.0:
            self._reference = ReferencePolicy(self.model, get_peft_model_state_dict(self.model))

    def kept_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that lie on the device between two steps."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self._reference.tensors
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def advantages(self) -> NDArray[np.float64]:
        """The advantages (N,) of the completions of the newest batch."""
        return self._splitter.advantages

    def forget_batch(self) -> None:
        """Drop the tensors that the steps over the last batch have left on the device. No step over it follows."""
        self._splitter.forget()
        self._summaries = []
        self._step_loss = self._step_loss.cpu()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave the model where `load_policy` has put it."""

    # Steps.

    def get_train_dataloader(self) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step to come; a batch is trained `num_iterations` times. `max_steps` bounds the run."""
        for batch in self._batches:
            if self._ranks.world > 1 and self._ranks.rank == 0:
                self._ranks.share(Train.of(batch))  # before this rank trains it
            self._newest_groups, self._is_cut = batch.groups, batch.last_step > self.args.max_steps
            self._choose_passes()  # in turns the model comes with the batch, whose rows are split by the choice
            self._splitter.begin(self.recipe, batch.groups, batch.answers, batch.weights)
            for step in steps_of(batch, self._ranks, self):
                yield self._splitter.split(step)

    def training_step(self, model: Any, inputs: list[MicroBatch], num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of the whole step; its gradient is at the parameters afterwards. A step that the device has no memory
        for recomputes its layers, then is split into smaller passes, and begins anew.

        Raises:
            DeviceError: it cannot be split any smaller.
        """
        ranks, device, splitter = self._ranks, self.accelerator.device, self._splitter
        memory = PassMemory(device)
        if splitter.random_state is not None:
            set_random_state(device, splitter.random_state)
        drawn_from = random_state(device)
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if ranks.world > 1 and not self.spreads_weights and self.state.global_step % CHECK_EVERY == 0:
            check_agreement(ranks, self.state.global_step, trained)
        began, waited_s = time.monotonic(), ranks.waited_s
        while True:
            try:
                with self._oom_on_all_ranks():
                    super().training_step(model, inputs, num_items_in_batch)
                break
            except OutOfMemory as error:
                problem = str(error)
            self.model.zero_grad()
            clear_device_cache(garbage_collection=True)
            set_random_state(device, drawn_from)
            if not self._recomputed.recompute_all():
                inputs = splitter.halve(problem)
        passes_s = time.monotonic() - began
        metrics = self.end_passes()
        if ranks.world > 1:
            alike = () if self.spreads_weights else trained.values()  # the gradients of parts are sums already
            for parameter in (each for each in alike if each.grad is None):  # no row of this rank went through it
                parameter.grad = torch.zeros_like(parameter)
            ranks.add([self._step_loss, *(parameter.grad for parameter in alike)])
            step_s, waited_s = time.monotonic() - began, ranks.waited_s - waited_s
            self.works[:] = work_of_all(ranks, step_s, waited_s, sum(size.tokens for size in self._passes))
        plan = MicroBatchPlan(
            self.state.global_step + 1, splitter.tokens, drawn_from if random_state(device) != drawn_from else None
        )
        metrics |= {"step_time": passes_s, "pipeline/micro_batch_tokens": float(splitter.tokens)}
        self.last = TrainedStep(plan, math.nan, metrics)
        if ranks.rank == 0:
            self.add_to_log(metrics)
        largest = max(size.places for size in self._passes)
        splitter.measured(self._recomputed.fitting_tokens() or memory.fitting_tokens(largest))
        return self._step_loss.clone()

    def _prepare_inputs(self, inputs: list[MicroBatch]) -> list[MicroBatch]:
        """Add the log-probs of fixed policies, computed once per batch and kept on the device for its iterations. The rest stays
        on the CPU until its pass."""
        self._cut_batch.give_to(inputs)
        for batch in inputs:
            with torch.no_grad():
                if self.args.num_iterations > 1 and "old_per_token_logps" not in batch:
                    batch["old_per_token_logps"] = self.forward_pass(batch).logprobs
                if self.args.beta != 0.0 and "ref_per_token_logps" not in batch:
                    with self._reference:
                        batch["ref_per_token_logps"] = self.forward_pass(batch).logprobs
        if self._is_cut:
            self._cut_batch.keep(inputs)
        return inputs

    def compute_loss(
        self, model: Any, inputs: list[MicroBatch], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return this rank's part of the loss of a step. Its gradient is that of the last micro-batch; those of the others are
        there already."""
        threshold = None
        if self.args.top_entropy_quantile < 1.0 and (len(inputs) > 1 or self._ranks.world > 1):
            with torch.no_grad(), self._oom_on_all_ranks():
                passes = [(batch, self.forward_pass(batch)) for batch in inputs]
            threshold = EntropyThreshold.of_passes(passes, self.args.top_entropy_quantile, self._ranks)
        total = torch.zeros((), device=self.accelerator.device)
        self._summaries, self._passes = [], []
        for number, batch in enumerate(inputs, start=1):
            loss = self._part_of_loss(batch, threshold)
            if number < len(inputs):
                self.accelerator.backward(loss)
                loss = loss.detach()
                self.callback_handler.on_substep_end(self.args, self.state, self.control)
            total = total + loss
        self._step_loss = total.detach()
        return total

    def _part_of_loss(self, batch: MicroBatch, threshold: EntropyThreshold | None) -> torch.Tensor:
        found = self.forward_pass(batch, teaches=True)
        if self.args.top_entropy_quantile < 1.0 and threshold is None:  # this is all of the step
            threshold = EntropyThreshold.of_passes([(batch, found)], self.args.top_entropy_quantile, self._ranks)
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
            advantages=token_advantages(batch, self._teacher_coef if found.divergences is None else 0.0),
            mask=loss_mask(batch),
        )
        loss, seen = part_of_loss(
            self.args, batch, found, factors, threshold=threshold,
            entropy_coef=self._entropy_bonus.acting_coef, aux_loss_coef=self._router_loss_coef,
            teacher_coef=self._teacher_coef, answer_coef=self._answer_coef,
        )  # fmt: skip
        ratios = ratio_values(self._correction, factors, places)
        of_tokens, of_rows = samples_of(self._correction)
        samples = sampled(ratios, of_tokens, num_tokens) | {name: ratios[name] for name in of_rows}
        values = {f"{_RATIO}{name}": each for name, each in ratios.items()}
        values |= values_of(seen, places, current.shape)
        self._summaries.append(Summary.of(values, samples))
        return loss

    def _oom_on_all_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Handle a device without memory in the passes inside. With a sharded base one rank cannot abandon a pass alone."""
        return contextlib.nullcontext() if self.is_sharded else oom_on_all_ranks(self._ranks)

    def end_passes(self) -> dict[str, float]:
        """Return the metrics of the passes of a step, those of the ratios on rank 0 alone, and move the adaptive entropy
        coefficient. All ranks call it."""
        of_step, samples = over_ranks(merged(self._summaries), self._ranks)
        metrics = metrics_of_step({name: each for name, each in of_step.items() if not name.startswith(_RATIO)})
        self._entropy_bonus.adapt(metrics.pop(ACTING_ENTROPY, 0.0))
        if self._entropy_bonus.is_on:
            metrics["entropy_coef"] = self._entropy_bonus.coef
        elif not self._answer_coef:
            metrics.pop("policy_loss", None)  # it is the loss
        if self._ranks.rank != 0:
            return {}
        ratios = {name.removeprefix(_RATIO): each for name, each in of_step.items() if name.startswith(_RATIO)}
        statistics = ratio_statistics(self._correction, ratios, samples)
        return metrics | {f"{_RATIO}{name}": value for name, value in statistics.items()}

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        """Note loss and norm: transformers asks once per step, after the last backward pass and before the optimizer. A gradient
        that a scaler finds infinite is its own business: it skips the step and scales down."""
        step = self.last
        assert step is not None
        step.loss, step.grad_norm = float(self._step_loss), float(whole(super()._get_grad_norm(model, grad_norm)))
        has_scaler = self.accelerator.scaler is not None and self.accelerator.scaler.is_enabled()
        if not math.isfinite(step.loss) or not (math.isfinite(step.grad_norm) or has_scaler):
            raise NotFiniteStep(step.loss, step.grad_norm)
        return step.grad_norm

    # Passes.

    def _choose_passes(self) -> None:
        """Choose how rows go through the model, once, where it computes. All ranks call it."""
        self.row_passes.choose()
        self.recipe = replace(self.recipe, tree=self.row_passes.kernel is not None)

    def forward_pass(self, batch: MicroBatch, *, teaches: bool = False) -> Pass:
        """Return log-probs and entropies (if it `teaches` also divergences) of the policy; 0 outside the loss (`scored_mask`)."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        tokens = Tokens(ids, mask, scored_mask(batch))
        layout = self.row_passes.layout(tokens)
        self._passes.append(PassSize(layout.ids.numel(), layout.num_tokens))
        if teaches:
            layout = layout.with_teacher(batch, self.recipe.rewards.distillation)
        layout = layout.on(self.accelerator.device)
        with self._recomputed.of_pass(layout.ids.numel()), self.accelerator.autocast():
            return self.row_passes(layout, entropy_trains=self._entropy_bonus.is_on)

    # Logs and checkpoints.

    def add_to_log(self, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step to the means that the next log has."""
        for name, value in numbers.items():
            total, count = self._unlogged.get(name, (0.0, 0))
            self._unlogged[name] = (total, count) if math.isnan(value) else (total + value, count + 1)

    def log(self, logs: dict[str, float | None], start_time: float | None = None) -> None:
        """Log these and the means of all numbers since the last log; None for NaN, which trackers refuse."""
        logs |= {name: total / count if count else None for name, (total, count) in self._unlogged.items()}
        self._unlogged.clear()
        super().log(logs, start_time)
        if self.args.log_completions:
            log_completions(self, self._newest_groups)

    def log_now(self, numbers: Mapping[str, float]) -> None:
        """Send these to every tracker at once, beside the numbers of steps."""
        super().log(dict(numbers))

    def _get_output_dir(self, trial: Any) -> str:
        """Return where transformers writes checkpoints; they are moved from there when they are complete."""
        return str(checkpoints.staging(Path(self.args.output_dir)))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        staged, write = Path(self._get_output_dir(trial)) / f"checkpoint-{step}", super()._save_checkpoint

        def whole() -> None:
            write(model, trial)
            self._entropy_bonus.save(staged)
            self._cut_batch.save(staged)

        self._commit_checkpoint(step, staged, whole)

    def save_weights(self, folder: str) -> None:
        """Write the model whose own weights have trained."""
        self.gather("model")
        save_weights(self.base, self.processing_class, folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.gather("model")
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.gather("optimizer")
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.spreads_weights:
            load_weights(self.base, Path(resume_from_checkpoint) if self._ranks.rank == 0 else None)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with present_settings(self.optimizer, self.lr_scheduler):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._entropy_bonus.load(Path(checkpoint))
            self._cut_batch.load(Path(checkpoint))
