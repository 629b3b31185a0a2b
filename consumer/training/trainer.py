"""The GRPO trainer: TRL's, fed with groups that were generated elsewhere.

Guarantee: callbacks, checkpointing and every option of `trl.GRPOConfig` that is neither generation nor the loss are TRL's own.
This module only says where batches come from and where checkpoints go; `consumer.training.trl_loss` has the loss. It knows no
socket and no journal.

Private names of TRL 1.16.0 and transformers used here, each with a test in tests/contract: `_metrics`, `_logs`, `_tokenizer`,
`_get_output_dir`, `_save_checkpoint`, `_move_model_to_device`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, Trainer

from consumer.batches.step_cuts import Recorded, StepCutter
from consumer.batches.tensors import BatchRecipe, MicroBatch
from consumer.checkpoints import folders as checkpoints
from consumer.checkpoints.initial_adapter import InitialAdapter
from consumer.loss.importance import resolve
from consumer.loss.reference import ReferencePolicy
from consumer.prompts.tokenizer import load_tokenizer
from consumer.ranks.exchange import ALONE, Ranks
from consumer.training.base_loading import check_room, device_map
from consumer.training.memory import OutOfMemory, PassMemory, random_state, set_random_state
from consumer.training.quantization import keep_as_it_trains, quantization_config
from consumer.training.trl_loss import StepLossTrainer
from consumer.training.vision_language import within_text_model
from protocol.config.run import RunConfig
from replay.batches.cutting import CutBatch
from replay.groups import RolloutGroup
from replay.journal.tables import StepCut
from replay.rewards import RewardRecipe


class SlipstreamTrainer(StepLossTrainer):
    """`trl.GRPOTrainer` fed with groups that were generated elsewhere.

    Args:
        batches: iterating it yields the groups of the next optimizer steps, and blocks while there are none.
        commit_checkpoint: is called with the step, the folder that transformers will write to and the call that writes.
        ranks: that share the work of every step.
        recorded: how steps were cut before.

    Attributes:
        last_cut: how the last step was cut; None before the first.
    """

    def __init__(
        self,
        config: RunConfig,
        arguments: Any,
        lora: LoraConfig,
        model_folder: Path,
        batches: Iterable[CutBatch],
        commit_checkpoint: Callable[[int, Path, Callable[[], None]], None],
        ranks: Ranks = ALONE,
        recorded: Recorded = lambda step: None,
    ) -> None:
        self._shares_gpu = config.pipeline.gpu == "turns"
        on_gpu = not arguments.use_cpu
        if on_gpu:
            check_room(config, model_folder, ranks.world)
        arguments.model_init_kwargs["device_map"] = device_map(
            config.pipeline.gpu, on_gpu=on_gpu, num_ranks=ranks.world
        )
        sides = {"padding_side": "left", "truncation_side": "left"}
        tokenizer = load_tokenizer(model_folder, trust_remote_code=arguments.trust_remote_code, **sides)
        super().__init__(
            resolve(config.correction),
            ranks,
            config.pipeline.shard_base,
            model=str(model_folder),
            reward_funcs=[_scored_elsewhere(name) for name in config.reward_names],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # TRL wants one; the prompts live in the ledger
            processing_class=tokenizer,
            peft_config=within_text_model(lora, model_folder),
            quantization_config=quantization_config(config.model),
        )
        if config.model.quantization is not None:
            keep_as_it_trains(self._peft_model)
        self.remove_callback(PrinterCallback)  # the progress report shows the same numbers in one line
        self.args.save_total_limit = (
            None  # transformers would delete before the new one is committed; see CheckpointWriter
        )
        self._batches = batches
        self._commit_checkpoint = commit_checkpoint
        self._cuts = StepCutter(config.pipeline.trainer_tokens_per_micro_batch, ranks, recorded)
        self.last_cut: StepCut | None = None
        self.recipe = BatchRecipe(
            rewards=RewardRecipe.of(config, arguments.multi_objective_aggregation),
            num_generations=config.sampling.num_generations,
            max_tokens=self._cuts.tokens,
            packed=self._packed,
            only_advantages=self.beta == 0.0 and not self._entropy_bonus_enabled and self.top_entropy_quantile == 1.0,
            keeps_all_rows=self.aux_loss_enabled,
            pad_token_id=self._tokenizer.pad_token_id,
            scale_rewards=arguments.scale_rewards,
            baseline=config.advantage.baseline,
            mask_truncated=arguments.mask_truncated_completions,
            seed=config.seed,
            rank=ranks.rank,
            world=ranks.world,
            in_step=self.is_sharded,
        )

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """A GPU that is shared is not the trainer's yet."""
        if not self._shares_gpu:
            super()._move_model_to_device(model, device)

    def start_from(self, adapter: InitialAdapter, *, resumed: bool) -> None:
        """The adapter becomes the reference policy, and the policy unless a checkpoint has one."""
        if not resumed:
            adapter.load_into(self._peft_model)
        if self.beta != 0.0:
            self._reference = ReferencePolicy(self._peft_model, adapter.tensors)

    def kept_tensors(self) -> Iterator[torch.Tensor]:
        """What lies on the device between two steps."""
        yield from self._peft_model.parameters()
        yield from self._peft_model.buffers()
        yield from self._reference.tensors
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def forget_batch(self) -> None:
        """Drop what the steps over the last batch have left on the device. No step over it follows."""
        self._cuts.forget()
        self._summaries = []
        self._step_loss = self._step_loss.cpu()

    def get_train_dataloader(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step to come; a batch is trained `num_iterations` times. What transformers takes for a loader
        has no length: `max_steps` bounds the run."""
        for batch in self._batches:
            if self.log_completions:
                self._remember_completions(batch.groups)
            yield from self._cuts.steps(self.recipe, batch)

    def training_step(self, model: Any, inputs: list[MicroBatch], num_items_in_batch: Any = None) -> torch.Tensor:
        """As of the loss. A step that the device has no memory for is cut into smaller passes, and begins anew.

        Raises:
            DeviceError: it cannot be cut any smaller.
        """
        device, memory = self.accelerator.device, PassMemory(self.accelerator.device)
        if self._cuts.random_state is not None:
            set_random_state(device, self._cuts.random_state)
        drawn_from = random_state(device)
        while True:
            try:
                loss = super().training_step(model, inputs, num_items_in_batch)
                break
            except OutOfMemory as error:
                problem = str(error)
            self.model.zero_grad()
            clear_device_cache(garbage_collection=True)
            set_random_state(device, drawn_from)
            inputs = self._cuts.halve(problem)
        draws = random_state(device) != drawn_from
        self.last_cut = StepCut(self.state.global_step + 1, self._cuts.tokens, drawn_from if draws else None)
        self.record_metric("pipeline/micro_batch_tokens", float(self._cuts.tokens))
        self._cuts.measured(memory.fitting_tokens(inputs, padded=not self._packed))
        return loss

    @property
    def last_step(self) -> dict[str, float]:
        """Loss of the last step, and the norm of its gradient before clipping, whatever `logging_steps` says."""
        return {"loss": float(self._step_loss), "grad_norm": self._grad_norm}

    def log_now(self, numbers: Mapping[str, float]) -> None:
        """Sends these to every tracker at once, beside the metrics of steps, which TRL collects."""
        Trainer.log(self, dict(numbers))

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers writes checkpoints; they are moved from there when they are complete."""
        return str(checkpoints.staging(Path(self.args.output_dir)))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, write = self.state.global_step, super()._save_checkpoint
        staged = Path(self._get_output_dir(trial)) / f"checkpoint-{step}"
        self._commit_checkpoint(step, staged, lambda: write(model, trial))

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
