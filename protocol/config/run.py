"""The schema of the one configuration file that both daemons read.

Guarantee: a `RunConfig` that exists is complete and consistent; every value that follows from others is a property here
and cannot be set. The sections `engine`, `lora`, `trainer` and `sft` keep the names of the library they belong to (vLLM engine
arguments, peft.LoraConfig, trl.GRPOConfig, trl.SFTConfig). Here only the keys that Slipstream sets itself are refused, and its
own are checked (protocol/config/library_rules.py); the library judges the rest when its daemon starts, or at `--check full`.
"""

import os
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from protocol.config import consistency, trainer_keys
from protocol.config.library_rules import LORA_DEFAULTS, RESERVED, SERVABLE_RANKS, check
from protocol.config.sections.dataset import DatasetSection
from protocol.config.sections.engine_server import EngineServerSection
from protocol.config.sections.environment import REWARD_NAME, EnvironmentSection, with_atropos
from protocol.config.sections.evaluation import EvaluationSection
from protocol.config.sections.learning import (
    AdvantageSection,
    CorrectionSection,
    GuardsSection,
    PipelineSection,
    ReplaySection,
    RerollSection,
)
from protocol.config.sections.model import ModelSection, SamplingSection
from protocol.config.sections.observability import ObservabilitySection
from protocol.config.sections.producers import ProducersSection
from protocol.config.sections.rewards import RewardsSection
from protocol.config.sections.section import Count, Problems, Section
from protocol.config.sections.serve import ServeSection
from protocol.config.sections.swap import SwapSection
from protocol.config.sections.transport import TransportSection, next_endpoint


class RunConfig(Section):
    """One run. See docs/configuration.md, which is generated from this schema."""

    run_dir: str = Field(description="Folder of the run: checkpoints, logs, sockets.")
    seed: Count = Field(42, description="Seed of prompt order, sampling, LoRA initialization and torch.")
    model: ModelSection
    dataset: DatasetSection
    rewards: RewardsSection = RewardsSection()
    environment: EnvironmentSection = EnvironmentSection()
    sampling: SamplingSection = SamplingSection()
    pipeline: PipelineSection = PipelineSection()
    replay: ReplaySection = ReplaySection()
    reroll: RerollSection = RerollSection()
    advantage: AdvantageSection = AdvantageSection()
    correction: CorrectionSection = CorrectionSection()
    swap: SwapSection = SwapSection()
    serve: ServeSection = ServeSection()
    transport: TransportSection = TransportSection()
    observability: ObservabilitySection = ObservabilitySection()
    guards: GuardsSection = GuardsSection()
    evaluation: EvaluationSection | None = Field(
        None, description="A held-out set, scored by the producers every so many versions. Without it there is none."
    )
    engine_server: EngineServerSection | None = Field(
        None,
        description="A plain `vllm serve` that is already running, in place of `engine`: the producer becomes its client and "
        "needs no GPU. See docs/engine-server.md.",
    )
    producers: ProducersSection | None = Field(
        None, description="How many producers `rl-cluster` keeps, by the load. Without it: as many as it is told."
    )
    lora: dict[str, Any] = Field(
        default_factory=lambda: dict(LORA_DEFAULTS),
        description="peft.LoraConfig. DoRA, biases and modules_to_save are refused: vLLM cannot serve them.",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments.")
    trainer: dict[str, Any] = Field(default_factory=lambda: dict(trainer_keys.DEFAULTS), description="trl.GRPOConfig.")
    sft: dict[str, Any] = Field(default_factory=dict, description="trl.SFTConfig, of `rl-sft`.")

    @field_validator(*RESERVED)
    @classmethod
    def _check_library_section(cls, value: dict[str, Any], info: Any) -> dict[str, Any]:
        return check(info.field_name, value)

    @field_validator("environment", mode="before")
    @classmethod
    def _factory_alone(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _with_atropos(cls, values: Any) -> Any:
        return with_atropos(values)

    def problems(self) -> Problems:
        return consistency.problems(self)

    # What follows from the above, and therefore cannot be set.

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The columns of every reward array: the functions in order, then the environment's own."""
        return self.rewards.names + ((REWARD_NAME,) if self.environment.own_weight is not None else ())

    @property
    def posted_rewards(self) -> tuple[str, ...]:
        return self.rewards.posted + ((REWARD_NAME,) if self.environment.is_played_outside else ())

    @property
    def reward_weights(self) -> tuple[float, ...]:
        own = self.environment.own_weight
        return tuple(function.weight for function in self.rewards.functions) + (() if own is None else (own,))

    @property
    def completions_per_step(self) -> int:
        return self.pipeline.groups_per_step * self.sampling.num_generations

    @property
    def max_lora_rank(self) -> int:
        """The smallest rank that vLLM serves and that holds `lora.r`."""
        return min(rank for rank in SERVABLE_RANKS if rank >= self.lora["r"])

    @property
    def training_loras(self) -> int:
        """Adapters that training may need at once: every version whose groups can still be trained, and the one being loaded."""
        return self.pipeline.staleness_limit + 2

    @property
    def max_loras(self) -> int:
        """The adapters that training may need, and one that is evaluated."""
        return self.training_loras + (self.evaluation is not None)

    @property
    def lora_slots(self) -> int:
        """The adapters that the engine has room for: these, and those of clients."""
        return self.max_loras + self.serve.num_lora_slots

    @property
    def control_endpoint(self) -> str:
        return self.transport.endpoint or f"ipc://{os.path.abspath(self.run_dir)}/control.ipc"

    @property
    def blob_endpoint(self) -> str:
        return self.transport.blob_endpoint or next_endpoint(self.control_endpoint)

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.run_dir) / "checkpoints"

    @property
    def journal_file(self) -> Path:
        return Path(self.run_dir) / "journal.sqlite"
