"""The keys of the one configuration file that both daemons read.

Guarantee: every value that follows from others is a property here and cannot be set. The sections `engine`, `lora`, `trainer` and
`sft` keep the names of the library they belong to (vLLM engine arguments, peft.LoraConfig, trl.GRPOConfig, trl.SFTConfig). Here
only the keys that Slipstream sets itself are refused, and its own are checked (protocol/config/library_section.py). `--check` and
daemons that start hold the others to the library's fields (protocol/config/library_values.py); the library judges the rest when
its daemon starts.
"""

import math
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.config import lora_section, trainer_keys
from protocol.config.data import DatasetSection, EvaluationSection, ModelSection, SamplingSection
from protocol.config.distillation import DistillationSection, TeacherSection
from protocol.config.environment_servers import SERVERS
from protocol.config.environments import SINGLE_TURN, NamedEnvironment
from protocol.config.learning import (
    AdvantageSection,
    CorrectionSection,
    GuardsSection,
    LossSection,
    PipelineSection,
    ReplaySection,
    RerollSection,
    ShardBase,
)
from protocol.config.library_section import (
    LORA_DEFAULTS,
    RESERVED,
    SERVABLE_RANKS,
    check,
    with_defaults,
)
from protocol.config.operation import (
    PROBE_EVERY,
    TOLERANCES,
    CheckpointsSection,
    EngineServerSection,
    ObservabilitySection,
    ProducersSection,
    ServeSection,
    SwapSection,
    TransportSection,
    next_endpoint,
)
from protocol.config.rewards import REWARD_NAME, EnvironmentSection, RewardsSection, with_atropos, with_only_reward
from protocol.config.section import COLLECT, Count, Section


class RunValues(Section):
    """The keys of a run's configuration, and what follows from them."""

    run_dir: str = Field(description="Folder of the run: checkpoints, logs, sockets.")
    folder: str = Field(
        ".",
        description="Folder in which relative paths begin and both daemons work. Default: that of this file.",
    )
    seed: Count = Field(42, description="Seed of prompt order, sampling, LoRA initialization and torch.")
    model: ModelSection
    dataset: DatasetSection
    rewards: RewardsSection = RewardsSection()
    environment: EnvironmentSection = EnvironmentSection()
    environments: list[NamedEnvironment] = Field(
        [], description="Several environments in one run, with the keys of `environment`. See docs/environments.md."
    )
    sampling: SamplingSection = SamplingSection()
    pipeline: PipelineSection = PipelineSection()
    replay: ReplaySection = ReplaySection()
    reroll: RerollSection = RerollSection()
    advantage: AdvantageSection = AdvantageSection()
    correction: CorrectionSection = CorrectionSection()
    teachers: list[TeacherSection] = Field(
        [], description="Models whose log-probs of sampled tokens teach; producers ask them."
    )
    distillation: DistillationSection | None = Field(
        None, description="Learning from `teachers`. See docs/algorithms.md."
    )
    loss: LossSection = LossSection()
    swap: SwapSection = SwapSection()
    serve: ServeSection = ServeSection()
    transport: TransportSection = TransportSection()
    observability: ObservabilitySection = ObservabilitySection()
    guards: GuardsSection = GuardsSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    evaluation: EvaluationSection | None = Field(
        None, description="A held-out set, scored by the producers every N versions. Without it there is no evaluation."
    )
    engine_server: EngineServerSection | None = Field(
        None,
        description="A plain `vllm serve` that is already running, in place of `engine`: the producer becomes its client and "
        "needs no GPU. See docs/engine-server.md.",
    )
    producers: ProducersSection | None = Field(
        None,
        description="How many producers `slipstream cluster` keeps, by the load. Without it: the number on its command line.",
    )
    lora: dict[str, Any] | None = Field(
        default_factory=lambda: dict(LORA_DEFAULTS),
        description="peft.LoraConfig. The trainer merges what vLLM cannot serve, such as DoRA. `null`: no adapter; the weights "
        "themselves train ([how](architecture.md#the-swap)).",
    )
    trainable: list[str] = Field(
        [], description="With `lora: null`: patterns (`*.norm.*`) of the parameters that train. Default: all."
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments.")
    trainer: dict[str, Any] = Field(default_factory=dict, validate_default=True, description="trl.GRPOConfig.")
    sft: dict[str, Any] = Field(default_factory=dict, description="trl.SFTConfig, of `slipstream sft`.")

    @field_validator(*RESERVED)
    @classmethod
    def _check_library_section(cls, value: dict[str, Any] | None, info: Any) -> dict[str, Any] | None:
        ours = trainer_keys.defaults(info.data.get("lora", {})) if info.field_name == "trainer" else {}
        if value is None or info.context == COLLECT:
            return None if value is None else with_defaults(info.field_name, ours | value)
        return check(info.field_name, ours | value)

    @field_validator("environment", mode="before")
    @classmethod
    def _factory_alone(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _with_what_follows(cls, values: Any) -> Any:
        return with_only_reward(with_atropos(values))

    # What follows from the above, and therefore cannot be set.

    @property
    def by_environment(self) -> dict[str, EnvironmentSection]:
        """The environments by the names that rows have for them; that of the section `environment` is empty."""
        alone = {"": self.environment} if self.environment.is_given else {}
        return {environment.name: environment for environment in self.environments} or alone

    @property
    def may_skip(self) -> tuple[str, ...]:
        """The environments that the run may go on without."""
        return tuple(environment.name for environment in self.environments if environment.on_failure == "skip")

    @property
    def routes(self) -> tuple[str, ...]:
        """The names that the column `environment` of a row may have; none in a run without `environments`."""
        return (SINGLE_TURN, *self.by_environment) if self.environments else ()

    @property
    def own_rewards(self) -> dict[str, float]:
        """The weights of the environments' own rewards, by the names of their columns."""
        sections = self.by_environment.items()
        return {name or REWARD_NAME: weight for name, each in sections if (weight := each.own_weight) is not None}

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The columns of every reward array: the functions in order, then the environments' own."""
        return self.rewards.names + tuple(self.own_rewards)

    @property
    def computed_rewards(self) -> RewardsSection:
        return self.rewards.computed(self.model.path, self.model.revision)

    def posted_by(self, environment: str = "") -> dict[str, str]:
        """The rewards that agents post for rows of an environment, and the names of their columns; none if no agent plays it."""
        section = self.by_environment.get(environment, self.environment)
        if section.factory is not None or environment == SINGLE_TURN:
            return {}
        functions = [
            function
            for function in self.rewards.functions
            if function.posted is not None and function.scores(environment)
        ]
        own = {REWARD_NAME: environment or REWARD_NAME} if section.is_played_outside else {}
        return {function.name: function.name for function in functions} | own

    @property
    def posted_rewards(self) -> tuple[str, ...]:
        """The columns of all rewards that agents post."""
        posted = [name for route in self.routes or ("",) for name in self.posted_by(route).values()]
        return tuple(name for name in self.reward_names if name in {*posted, *self.rewards.posted})

    @property
    def reward_weights(self) -> tuple[float, ...]:
        return (*(function.weight for function in self.rewards.functions), *self.own_rewards.values())

    @property
    def outcome_weights(self) -> tuple[float, ...]:
        """The weights of rewards in a completion's advantage: `reward_weights`, but 0 for the sum of steps' rewards that credit
        the turns of those steps."""
        if self.rewards.credit == "outcome":
            return self.reward_weights
        of_steps = {name or REWARD_NAME for name, section in self.by_environment.items() if section.factory in SERVERS}
        columns = zip(self.reward_names, self.reward_weights, strict=True)
        return tuple(0.0 if name in of_steps else weight for name, weight in columns)

    @property
    def weights(self) -> Literal["adapter", "merged", "full"]:
        """The form of a policy in an engine: an adapter beside its weights, one that it merges into them, or all weights."""
        return "full" if self.patched_by else self.swap.mode

    @property
    def merged_keys(self) -> tuple[str, ...]:
        """The keys of `lora` for which the trainer merges the adapter, because vLLM cannot serve it."""
        return lora_section.merged_keys(self.lora_section)

    @property
    def patched_by(self) -> str:
        """The key for which policies travel as patches; "": they do not."""
        if self.lora is None:
            return "lora: null"
        return f"lora.{self.merged_keys[0]}" if self.merged_keys else ""

    @property
    def changes_base(self) -> bool:
        """Return whether the adapter begins with a part of the base, as that of PiSSA does."""
        return lora_section.changes_base(self.lora_section)

    @property
    def shard_base(self) -> ShardBase:
        """The way in which ranks share the base: a trainer that merges needs whole layers."""
        return "none" if self.merged_keys else self.pipeline.shard_base

    @property
    def trainer_dtype(self) -> str:
        """The dtype of the base in the trainer: weights that train themselves are float32."""
        return self.model.dtype if self.lora is not None else "float32"

    @property
    def spreads_weights(self) -> bool:
        """Return whether several ranks share the weights that train."""
        return self.lora is None and self.pipeline.shard_base != "none"

    @property
    def lora_section(self) -> dict[str, Any]:
        """The section `lora`; empty where the weights themselves train."""
        return self.lora or {}

    @property
    def on_swap(self) -> Literal["finish", "continue", "restart"]:
        """The fate of requests in flight when a policy arrives."""
        return self.swap.in_flight or ("finish" if self.weights == "adapter" else "continue")

    @property
    def completions_per_step(self) -> int:
        return self.pipeline.groups_per_step * self.sampling.num_generations

    @property
    def probe_tolerance(self) -> float:
        """The largest root mean square, in nats, of engine minus trainer."""
        default = math.inf if self.engine.get("quantization") else TOLERANCES[self.model.dtype]
        return self.swap.probe_tolerance or default

    @property
    def probe_every(self) -> int:
        """The number of versions of which one is proved by behaviour; 0: none. A server shows no bits, and adapters of experts
        are not compared by them."""
        default = 1 if self.engine_server is not None or self.lora_section.get("target_parameters") else PROBE_EVERY
        return default if self.swap.probe_every is None else self.swap.probe_every

    @property
    def probe_slack(self) -> float:
        """The share by which the engine's change of a log-prob may systematically differ from the trainer's."""
        return 0.3 if self.engine.get("quantization") else 0.05

    @property
    def is_merged_in_16_bits(self) -> bool:
        """Return whether merged weights are rounded to a format that swallows small updates."""
        return (self.weights == "merged" or bool(self.merged_keys)) and self.model.dtype != "float32"

    @property
    def max_lora_rank(self) -> int:
        """The smallest rank that vLLM serves and that holds `lora.r`; 0 without adapters."""
        if not self.lora or self.merged_keys:
            return 0
        return min(rank for rank in SERVABLE_RANKS if rank >= self.lora["r"])

    @property
    def training_loras(self) -> int:
        """Adapters that training may need at once: every version whose groups can still be trained, and the one being loaded."""
        return self.pipeline.max_staleness + 2

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
