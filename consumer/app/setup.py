"""Parts that follow from the configuration alone, and that every way of training needs.

Guarantee: whatever is wrong with dataset, sections of libraries or model folder is reported here, before anything is written.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from prometheus_client import CollectorRegistry
from transformers import AutoConfig

from consumer.learn.adapters import AdapterFolder, initial_adapter
from consumer.learn.checkpoint_settings import Settings, settings_of
from consumer.learn.checkpoints import Checkpoint
from consumer.learn.options import build_arguments, build_lora, check_model
from consumer.learn.rotary import engine_lengths
from consumer.learn.run_facts import run_facts
from consumer.prompts.answers import Answers
from consumer.prompts.dataset import Placeholders, PromptDataset, open_prompts
from consumer.prompts.generated import with_rows
from consumer.prompts.loss_weights import LossWeights
from consumer.report.steps import LearningMetrics, StepReport
from consumer.waiting import StopRequested
from protocol.config.run import RunConfig
from protocol.errors import DatasetError
from protocol.wire.messages import RunPlan
from protocol.wire.model_folder import reading_model, vision_language
from protocol.wire.model_source import resolve_model
from replay.groups import GroupShape
from replay.rewards import RewardRecipe
from replay.staleness import StalenessBudget


class RunStart(NamedTuple):
    """The point from which a process continues a run."""

    run_id: str
    checkpoint: Checkpoint | None = None  # None: from the beginning

    @property
    def step(self) -> int:
        """Optimizer steps that were taken before."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def state(self) -> dict[str, Any]:
        """The run's state at the checkpoint; empty without one."""
        return self.checkpoint.state if self.checkpoint else {}


@dataclass(frozen=True)
class Setup:
    """Hold everything that follows from the configuration alone."""

    config: RunConfig
    stop: Callable[[], bool]
    lora: LoraConfig | None
    initial_adapter: AdapterFolder | None
    prompts: PromptDataset | Placeholders
    held_out: PromptDataset | None  # what is evaluated
    answers: Answers | None  # that are trained
    weights: LossWeights | None  # of the parts of the loss
    arguments: Any
    model_folder: Path
    shape: GroupShape
    budget: StalenessBudget
    rewards: RewardRecipe
    checkpoint_limit: int | None  # the newest that stay; None: all
    max_model_lens: tuple[int, int] | None  # see `engine_lengths`

    @classmethod
    def load(cls, config: RunConfig, gpus: list[int], stop: Callable[[], bool]) -> "Setup":
        lora = build_lora(config)
        adapter = initial_adapter(start, lora) if lora and (start := config.lora_section.get("init_from")) else None
        model_folder = resolve_model(
            config.model.path, config.model.revision, trust_remote_code=config.model.trust_remote_code
        )

        def check() -> None:
            if stop():
                raise StopRequested

        written = with_rows(config, check)
        prompts = open_prompts(written, model_folder, check)
        held_out = _held_out(written, model_folder, check)
        answers = Answers(config, prompts, model_folder) if config.loss.ce_coef else None
        weights = LossWeights(column, prompts) if (column := config.loss.weights_column) else None
        arguments = build_arguments(config, on_gpu=bool(gpus), num_prompts=len(prompts))
        model = model_config(model_folder, trust_remote_code=config.model.trust_remote_code)
        check_model(arguments, model, vision_language(model_folder), patched_by=config.patched_by)
        shape = GroupShape(
            config.sampling.num_generations,
            len(config.reward_names),
            config.sampling.max_completion_length,
            int(model.vocab_size),
            has_teacher=bool(config.teachers),
            teacher_top_k=config.distillation.num_top if config.distillation else 0,
        )
        budget = StalenessBudget(
            config.pipeline.groups_per_step,
            config.pipeline.max_staleness,
            config.pipeline.sync_interval,
            arguments.num_iterations,
        )
        rewards = RewardRecipe.of(config, arguments.multi_objective_aggregation, arguments.scale_rewards)
        limit = arguments.save_total_limit  # the trainer takes it out of its arguments
        return cls(
            config,
            stop,
            lora,
            adapter,
            prompts,
            held_out,
            answers,
            weights,
            arguments,
            model_folder,
            shape,
            budget,
            rewards,
            limit,
            engine_lengths(config, model),
        )

    @property
    def settings(self) -> Settings:
        """Return what must be equal when a run goes on from a checkpoint. PEFT changes `lora` when it has the model."""
        return settings_of(self.config, self.arguments, build_lora(self.config))

    def facts(self, run_id: str) -> dict[str, str]:
        facts = run_facts(
            self.config, self.model_folder, run_id, self.shape.vocab_size, self.arguments.num_iterations,
            torch.get_num_threads(),
        )  # fmt: skip
        return (
            facts
            | self.prompts.sources.facts
            | {
                "dataset_digest": self.prompts.digest,
                "num_prompts": str(len(self.prompts)),
                "held_out_digest": self.held_out.digest if self.held_out else "",
                "initial_adapter_digest": self.initial_adapter.digest if self.initial_adapter else "",
            }
        )

    @property
    def plan(self) -> RunPlan:
        """The course of the run, for reward functions."""
        arguments, config = self.arguments, self.config
        per_epoch = len(self.prompts) / config.pipeline.groups_per_step * arguments.num_iterations
        opened = [prompts for prompts in (self.prompts, self.held_out) if isinstance(prompts, PromptDataset)]
        columns = dict.fromkeys(name for prompts in opened for name in prompts.columns) if opened else None
        return RunPlan(
            arguments.max_steps,
            arguments.max_steps / per_epoch,
            config.pipeline.sync_interval,
            None if columns is None else tuple(columns),
        )

    def report(self, counts: Counter[str], first_step: int, registry: CollectorRegistry) -> StepReport:
        metrics = LearningMetrics(
            registry,
            self.config.reward_names,
            max_steps=self.arguments.max_steps,
            max_staleness=self.config.pipeline.max_staleness,
            sources=self.prompts.sources.names,
            environments=self.prompts.sources.environments,
        )
        return StepReport(
            Path(self.config.run_dir),
            counts,
            metrics,
            max_steps=self.arguments.max_steps,
            first_step=first_step,
            show_bar=self.config.observability.progress,
        )


def _held_out(config: RunConfig, model_folder: Path, check: Callable[[], None]) -> PromptDataset | None:
    if config.evaluation is None:
        return None
    template = {"chat_template_kwargs": config.dataset.chat_template_kwargs}  # with which they are rendered, too
    try:
        trusted = config.model.trust_remote_code
        return PromptDataset(
            config.evaluation.dataset.model_copy(update=template), model_folder, trust_remote_code=trusted, check=check,
            environments=[name for name in config.routes if not config.posted_by(name)],
        )  # fmt: skip
    except DatasetError as error:
        raise DatasetError(f"evaluation.{error}") from error


def model_config(model_folder: Path, *, trust_remote_code: bool) -> Any:
    """
    Raises:
        ConfigError: transformers cannot read it.
    """
    with reading_model(f"{model_folder}/config.json"):
        return AutoConfig.from_pretrained(model_folder, trust_remote_code=trust_remote_code).get_text_config()
