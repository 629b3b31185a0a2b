"""The GRPO trainer: TRL's, with a few seams overridden.

Guarantee: loss, metrics, callbacks, checkpointing and every option of `trl.GRPOConfig` that is not generation are TRL's
own; this module only says where a batch comes from, how a step is cut and put together again, how log-probs are computed,
when those of fixed policies are, what the importance factors are, and that the bias-corrected KL carries them too. With one
update per batch the proximal policy is the current one, detached, so the factors come out of the loss's own forward pass; with
more, one pass per batch is added.

What transformers takes for a batch is all of an optimizer step, a list of micro-batches, so that their number may vary.

Private names of TRL 1.16.0 and transformers used here, each with a test in tests/contract: `_prepare_inputs`,
`compute_loss`, `_compute_loss`, `_get_per_token_logps_and_entropies`, `get_high_entropy_mask`, `_entropy_bonus_enabled`,
`_last_world_entropy`, `_metrics`, `_logs`, `_tokenizer`, `_get_output_dir`, `_save_checkpoint`, `_load_from_checkpoint`,
`vllm_importance_sampling_correction`, `current_gradient_accumulation_steps`, `_get_grad_norm`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, Trainer, TrainerCallback

from consumer.batches.tensors import BatchRecipe, MicroBatch, loss_mask
from consumer.checkpoints import folders as checkpoints
from consumer.checkpoints.initial_adapter import InitialAdapter
from consumer.loss.forward import Tokens, is_packable, is_plain, token_logprobs
from consumer.loss.importance import Factors, importance_factors, joined, resolve
from consumer.loss.kl import aggregate, missing_kl
from consumer.loss.lm_head import TokenLogprobs
from consumer.loss.ratio_statistics import ratio_statistics
from consumer.loss.reference import ReferencePolicy
from consumer.loss.step_loss import EntropyCut, Part, Pass, accumulation_steps, means_over_tokens, metrics_of_step
from consumer.prompts.tokenizer import load_tokenizer
from consumer.training.import_guard import without_vllm
from consumer.training.trl_arguments import check_arguments, chosen_values, reserved_values
from protocol.config.library_rules import for_library
from protocol.config.library_section import build
from protocol.config.run import RunConfig
from replay.batches.cutting import CutBatch
from replay.groups import RolloutGroup
from replay.rewards import RewardRecipe

with without_vllm():
    from trl import GRPOConfig, GRPOTrainer
    from trl.kernels import ChunkedLogProbFunction

_VOCABULARY_CHUNK = 32768  # of TRL's kernel


def build_arguments(config: RunConfig, *, on_gpu: bool, num_prompts: int) -> GRPOConfig:
    """The run's GRPOConfig: the `trainer` section plus what follows from the others.

    Raises:
        ConfigError: TRL does not know a key or refuses a value, or the value cannot be what it seems to ask for.
    """
    chosen, reserved = chosen_values(config, on_gpu=on_gpu), reserved_values(config, on_gpu=on_gpu)
    arguments = build("trainer", GRPOConfig, chosen, **reserved)
    if arguments.max_steps <= 0:
        num_batches = int(arguments.num_train_epochs * num_prompts) // config.pipeline.groups_per_step
        arguments.max_steps = max(1, num_batches) * arguments.num_iterations
    check_arguments(arguments, config)
    return arguments


def build_lora(config: RunConfig) -> LoraConfig:
    """The run's LoraConfig.

    Raises:
        ConfigError: PEFT does not know a key or refuses a value.
    """
    return build("lora", LoraConfig, {"task_type": "CAUSAL_LM"} | for_library("lora", config.lora))


class NotFiniteStep(Exception):  # noqa: N818  what to do about it is for the loop to say
    """Loss or gradient of the step in progress is NaN or infinite; weights and optimizer are as before it."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss:g}, gradient norm {grad_norm:g}")
        self.loss = loss
        self.grad_norm = grad_norm


class SlipstreamTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` fed with groups that were generated elsewhere.

    Args:
        batches: iterating it yields the groups of the next optimizer steps, and blocks while there are none.
        save_checkpoint: called with the folder that transformers will write to and the call that writes; makes it count.
    """

    def __init__(
        self,
        config: RunConfig,
        arguments: GRPOConfig,
        lora: LoraConfig,
        model_folder: Path,
        batches: Iterable[CutBatch],
        callbacks: list[TrainerCallback],
        save_checkpoint: Callable[[Path, Callable[[], None]], None],
    ) -> None:
        sides = {"padding_side": "left", "truncation_side": "left"}
        tokenizer = load_tokenizer(model_folder, trust_remote_code=arguments.trust_remote_code, **sides)
        super().__init__(
            model=str(model_folder),
            reward_funcs=[_scored_elsewhere(name) for name in config.reward_names],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # TRL wants one; the prompts live in the ledger
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)  # the progress report shows the same numbers in one line
        self.args.save_total_limit = None  # transformers would delete before the new checkpoint counts; see RunControl
        self._batches = batches
        self._make_count = save_checkpoint
        self._correction = resolve(config.correction)
        # The loss multiplies by `importance_sampling_ratio` when both flags are set. Set here, not in the arguments,
        # where `use_vllm` would start an engine.
        self.use_vllm = True
        self.vllm_importance_sampling_correction = self._correction.acts
        self._pass: Pass | None = None
        self._factors: list[Factors] = []
        self._step_loss = torch.zeros(())
        self._entropy_cut: EntropyCut | None = None
        model = self._causal_model
        self._is_plain = is_plain(model) and not (arguments.cast_lm_head_to_fp32 or self.aux_loss_enabled)
        with self.accelerator.autocast():  # as in every later pass; some kernels take no float32
            packed = self._is_plain and is_packable(model)
        self.recipe = BatchRecipe(
            rewards=RewardRecipe.of(config, arguments.multi_objective_aggregation),
            num_generations=config.sampling.num_generations,
            max_tokens=config.pipeline.trainer_tokens_per_micro_batch,
            packed=packed,
            only_advantages=self.beta == 0.0 and not self._entropy_bonus_enabled and self.top_entropy_quantile == 1.0,
            keeps_all_rows=self.aux_loss_enabled,
            pad_token_id=self._tokenizer.pad_token_id,
            scale_rewards=arguments.scale_rewards,
            baseline=config.advantage.baseline,
            mask_truncated=arguments.mask_truncated_completions,
            seed=config.seed,
        )
        self._num_completions = config.completions_per_step
        self._reference = ReferencePolicy(self.accelerator.unwrap_model(self.model))

    def start_from(self, adapter: InitialAdapter, *, resumed: bool) -> None:
        """The adapter becomes the reference policy, and the policy unless a checkpoint has one."""
        if not resumed:
            adapter.load_into(self.accelerator.unwrap_model(self.model))
        if self.beta != 0.0:
            self._reference = ReferencePolicy(self.accelerator.unwrap_model(self.model), adapter.tensors)

    @property
    def _causal_model(self) -> Any:
        """The base model, with the adapter's layers in it."""
        return self.accelerator.unwrap_model(self.model).get_base_model()

    def get_train_dataloader(self) -> Iterable[list[MicroBatch]]:
        return _Steps(self)

    def steps(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step to come; a batch is trained `num_iterations` times."""
        for batch in self._batches:
            tensors = self.recipe.tensors(batch.groups)
            if self.log_completions:
                self._remember_completions(batch.groups)
            for _ in range(batch.num_iterations):
                yield tensors

    def record_metric(self, name: str, value: float) -> None:
        """Adds to TRL's metrics, which are averaged over `logging_steps` and go to every tracker."""
        self._metrics["train"][name].append(value)

    def log_now(self, numbers: Mapping[str, float]) -> None:
        """Sends these to every tracker at once, beside the metrics of steps, which TRL collects."""
        Trainer.log(self, dict(numbers))

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers writes checkpoints; they are moved from there when they are complete."""
        return str(checkpoints.staging(Path(self.args.output_dir)))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        staged = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        write = super()._save_checkpoint
        self._make_count(staged, lambda: write(model, trial))

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
        parts = [Part(len(batch["advantages"]), int(loss_mask(batch).sum())) for batch in inputs]
        state, metrics = self.accelerator.gradient_state, self._metrics["train"]
        total, recorded, self._factors = torch.zeros((), device=self.accelerator.device), [], []
        try:
            for number, (batch, part) in enumerate(zip(inputs, parts, strict=True), start=1):
                self._metrics["train"] = defaultdict(list)
                state._set_sync_gradients(number == len(inputs))
                self.current_gradient_accumulation_steps = accumulation_steps(
                    self.loss_type,
                    part,
                    num_completions=self._num_completions,
                    num_tokens=int(batch["num_items_in_batch"]),
                )
                loss = self._compute_loss(model, batch)
                if number < len(inputs):
                    self.accelerator.backward(loss)
                    loss = loss.detach()
                    self.callback_handler.on_substep_end(self.args, self.state, self.control)
                total = total + loss
                recorded.append(self._metrics["train"])
        finally:
            self._metrics["train"], self.current_gradient_accumulation_steps = metrics, 1
            state._set_sync_gradients(True)
        for name, value in metrics_of_step(recorded, parts, self.loss_type, self.importance_sampling_level).items():
            self.record_metric(name, value)
        for name, value in ratio_statistics(self._correction, joined(self._factors)).items():
            self.record_metric(f"sampling/importance_sampling_ratio/{name}", value)
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
        """The loss of a micro-batch, as its part of the step's."""
        self._pass = seen = Pass(inputs)
        gated = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        bonus = 0.0 if gated else self.entropy_coef  # before TRL adapts it for the next step
        try:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        finally:
            self._pass = None
        if seen.missing_kl is not None:
            loss = loss + seen.missing_kl
        if seen.aux_loss is None and not self._entropy_bonus_enabled:
            return loss
        weight = 1 / self.current_gradient_accumulation_steps
        return loss + means_over_tokens(
            seen, weight, self._entropy_cut, entropy_coef=bonus, aux_loss_coef=self.router_aux_loss_coef
        )

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        if self._entropy_cut is None:
            result: torch.Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        else:
            result = (entropies >= self._entropy_cut.threshold) & mask.bool()
        if self._pass is not None:
            self._pass.entropy_mask = result
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
        if self._pass is not None:
            loss_mask = self._pass.loss_mask
        tokens = Tokens(input_ids, attention_mask, logits_to_keep, loss_mask)
        if self._is_plain and tokens.counts.any():
            with self.accelerator.autocast():
                result = (*token_logprobs(self._causal_model, tokens, self._head, packed=self.recipe.packed), None)
        else:
            result = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
        if self._pass is not None:
            _, self._pass.entropies, self._pass.aux_loss = result
            self._correct(self._pass, result[0])
        return result

    def _head(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """TRL's kernel where Triton runs, ours elsewhere."""
        if hidden.is_cuda:
            outputs = ("log_probs", "entropy")
            values = ChunkedLogProbFunction.apply(
                hidden, weight, bias, targets, self.temperature, _VOCABULARY_CHUNK, None, 1.0, outputs
            )
            return values[0], values[1]
        logprobs, entropies = TokenLogprobs.apply(
            hidden, weight, bias, targets, self.temperature, self._entropy_bonus_enabled
        )
        return logprobs, entropies

    def _correct(self, seen: Pass, current: torch.Tensor) -> None:
        """Puts the importance factors where TRL's loss looks for them."""
        inputs = seen.inputs
        proximal = inputs.get("old_per_token_logps", current.detach())
        factors = importance_factors(
            self._correction,
            current=current,
            proximal=proximal,
            behaviour=inputs["sampling_per_token_logps"],
            advantages=inputs["advantages"],
            mask=seen.loss_mask,
        )
        if self._correction.acts:
            inputs["importance_sampling_ratio"] = factors.policy
        if self.beta != 0.0 and self.args.use_bias_correction_kl and self._correction.level != "none":
            seen.missing_kl = self.beta * self._mean_kl(inputs, current, proximal, factors.kl)
        self._factors.append(factors)

    def _mean_kl(
        self, inputs: MicroBatch, current: torch.Tensor, proximal: torch.Tensor, ratio: torch.Tensor
    ) -> torch.Tensor:
        mask, reference = loss_mask(inputs), inputs["ref_per_token_logps"]
        per_token = missing_kl(current, proximal, reference, ratio, mask, level=self.importance_sampling_level)
        return aggregate(
            per_token,
            mask,
            self.loss_type,
            accumulation_steps=self.current_gradient_accumulation_steps,
            steps_per_generation=self.args.steps_per_generation,
            num_items=inputs["num_items_in_batch"],
            max_completion_length=self.max_completion_length,
        )

    def _remember_completions(self, groups: list[RolloutGroup]) -> None:
        """Fills the table that TRL prints and sends to trackers under `log_completions`."""
        for group in groups:
            prompt = self._tokenizer.decode(group.prompt_ids)
            self._logs["prompt"].extend([prompt] * group.num_completions)
            ids = [group.completion_ids[group.last_record(number)] for number in range(group.num_completions)]
            self._logs["completion"].extend(self._tokenizer.batch_decode(ids))
            for column, name in enumerate(self.reward_func_names):
                self._logs["rewards"][name].extend(group.rewards[:, column].tolist())
        self._logs["advantages"].extend(self.recipe.advantages_of(groups).tolist())


def _scored_elsewhere(name: str) -> Callable[..., list[float]]:
    """TRL wants reward functions and takes their names for its metrics; ours have run in the producers by then."""

    def reward(**_: Any) -> list[float]:
        raise AssertionError("rewards arrive with the groups")

    reward.__name__ = name
    return reward


class _Steps:
    """What transformers iterates as the data loader. It has no length: `max_steps` bounds the run."""

    def __init__(self, trainer: SlipstreamTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self._trainer.steps()
