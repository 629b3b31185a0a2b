"""The GRPO trainer: TRL's, with three seams overridden.

Guarantee: loss, metrics, callbacks, checkpointing and every option of `trl.GRPOConfig` that is not generation are TRL's
own; this module only says where a batch comes from, when log-probs of fixed policies are computed, what the importance
factors are, and that the bias-corrected KL carries them too. With one update per batch the proximal policy is the
current one, detached, so the factors come out of the loss's own forward pass; with more, one pass per batch is added.

Private names of TRL 1.16.0 and transformers used here, each with a test in tests/contract: `_prepare_inputs`,
`_compute_loss`, `_get_per_token_logps_and_entropies`, `_metrics`, `_logs`, `_tokenizer`, `_get_output_dir`,
`_save_checkpoint`, `_load_from_checkpoint`, `vllm_importance_sampling_correction`, `current_gradient_accumulation_steps`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from consumer import checkpoints
from consumer.arguments import check_arguments, chosen_values, reserved_values
from consumer.batches import BatchRecipe, MicroBatch
from consumer.importance import importance_factors, resolve
from consumer.kl import aggregate, missing_kl
from consumer.ratio_statistics import ratio_statistics
from protocol.config import RunConfig
from protocol.library_section import build
from replay.cutting import CutBatch
from replay.groups import RolloutGroup
from replay.rewards import RewardRecipe


@contextlib.contextmanager
def _without_vllm() -> Iterator[None]:
    """TRL imports vLLM where it is installed, which costs seconds and memory that a trainer has no use for."""
    present = sys.modules.get("vllm")
    sys.modules["vllm"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["vllm"]
        if present is not None:
            sys.modules["vllm"] = present


with _without_vllm():
    from trl import GRPOConfig, GRPOTrainer


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
    return build("lora", LoraConfig, {"task_type": "CAUSAL_LM"} | config.lora)


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
        tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left", truncation_side="left")
        super().__init__(
            model=str(model_folder),
            reward_funcs=[_scored_elsewhere(name) for name in config.rewards.names],
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
        self._inputs: MicroBatch | None = None
        self._missing_kl: torch.Tensor | None = None
        self.recipe = BatchRecipe(
            rewards=RewardRecipe.of(config, arguments.multi_objective_aggregation),
            num_generations=config.sampling.num_generations,
            num_completions=config.completions_per_step,
            micro_batch_size=config.micro_batch_size,
            pad_token_id=self._tokenizer.pad_token_id,
            scale_rewards=arguments.scale_rewards,
            baseline=config.advantage.baseline,
            mask_truncated=arguments.mask_truncated_completions,
            seed=config.seed,
        )

    def get_train_dataloader(self) -> Iterable[MicroBatch]:
        return _MicroBatches(self)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The micro-batches of every step to come; a batch is trained `num_iterations` times."""
        for batch in self._batches:
            tensors = self.recipe.tensors(batch.groups, batch.step)
            if self.log_completions:
                self._remember_completions(batch.groups)
            for _ in range(batch.num_iterations):
                yield from tensors

    def record_metric(self, name: str, value: float) -> None:
        """Adds to TRL's metrics, which are averaged over `logging_steps` and go to every tracker."""
        self._metrics["train"][name].append(value)

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers writes checkpoints; they are moved from there when they are complete."""
        return str(checkpoints.staging(Path(self.args.output_dir)))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        staged = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        write = super()._save_checkpoint
        self._make_count(staged, lambda: write(model, trial))

    def _prepare_inputs(self, generation_batch: MicroBatch) -> MicroBatch:
        """To the device, with the log-probs of fixed policies, computed once per batch and kept for its iterations."""
        inputs = {name: tensor.to(self.accelerator.device) for name, tensor in generation_batch.items()}
        if self.num_iterations > 1 and "old_per_token_logps" not in inputs:
            inputs["old_per_token_logps"] = self._fixed_logprobs(inputs)
        if self.beta != 0.0 and "ref_per_token_logps" not in inputs:
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                inputs["ref_per_token_logps"] = self._fixed_logprobs(inputs)
        generation_batch.update(inputs)
        return inputs

    def _fixed_logprobs(self, inputs: MicroBatch) -> torch.Tensor:
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            logprobs, _, _ = super()._get_per_token_logps_and_entropies(
                self.model, input_ids, attention_mask, inputs["completion_ids"].size(1)
            )
        return logprobs

    def _compute_loss(self, model: Any, inputs: MicroBatch) -> torch.Tensor:
        self._inputs, self._missing_kl = inputs, None
        try:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        finally:
            self._inputs = None
        return loss if self._missing_kl is None else loss + self._missing_kl

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any, Any]:
        result: tuple[torch.Tensor, Any, Any] = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._inputs is not None:
            self._correct(self._inputs, result[0])
        return result

    def _correct(self, inputs: MicroBatch, current: torch.Tensor) -> None:
        """Puts the importance factors where TRL's loss looks for them, and records how far off-policy the batch is."""
        proximal = inputs.get("old_per_token_logps", current.detach())
        factors = importance_factors(
            self._correction,
            current=current,
            proximal=proximal,
            behaviour=inputs["sampling_per_token_logps"],
            advantages=inputs["advantages"],
            mask=inputs["completion_mask"],
        )
        if self._correction.acts:
            inputs["importance_sampling_ratio"] = factors.policy
        if self.beta != 0.0 and self.args.use_bias_correction_kl and self._correction.level != "none":
            self._missing_kl = self.beta * self._mean_kl(inputs, current, proximal, factors.kl)
        for name, value in ratio_statistics(self._correction, factors).items():
            self.record_metric(f"sampling/importance_sampling_ratio/{name}", value)

    def _mean_kl(
        self, inputs: MicroBatch, current: torch.Tensor, proximal: torch.Tensor, ratio: torch.Tensor
    ) -> torch.Tensor:
        mask, reference = inputs["completion_mask"], inputs["ref_per_token_logps"]
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
            ids = torch.tensor(group.completion_ids).split(group.completion_lengths.tolist())
            prompt = self._tokenizer.decode(group.prompt_ids)
            self._logs["prompt"].extend([prompt] * group.num_completions)
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


class _MicroBatches:
    """What transformers iterates as the data loader. It has no length: `max_steps` bounds the run."""

    def __init__(self, trainer: SlipstreamTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._trainer.micro_batches()
