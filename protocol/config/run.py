"""The schema of the one configuration file that both daemons read.

Guarantee: a `RunConfig` that exists is complete and consistent; every value that follows from others is a property here
and cannot be set. The sections `engine`, `lora`, `trainer` and `sft` keep the names of the library they belong to (vLLM engine
arguments, peft.LoraConfig, trl.GRPOConfig, trl.SFTConfig). Here only the keys that Slipstream sets itself are refused, and its
own are checked (protocol/config/library_section.py); the library judges the rest when its daemon starts, or at `--check full`.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.config import lora_section, trainer_keys
from protocol.config.data import WEIGHTED_SUM, DatasetSection, EvaluationSection, ModelSection, SamplingSection
from protocol.config.distillation import DistillationSection, TeacherSection
from protocol.config.environments import SINGLE_TURN, NamedEnvironment, environment_problems
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
from protocol.config.library_section import LORA_DEFAULTS, RESERVED, SERVABLE_RANKS, check, library_problems, with_defaults
from protocol.config.operation import (
    PROBE_EVERY,
    TOLERANCES,
    EngineServerSection,
    ObservabilitySection,
    ProducersSection,
    ServeSection,
    SwapSection,
    TransportSection,
    next_endpoint,
)
from protocol.config.rewards import REWARD_NAME, EnvironmentSection, RewardsSection, with_atropos
from protocol.config.section import COLLECT, Count, Problems, Section


class RunConfig(Section):
    """The configuration of a run. See docs/configuration.md, which is generated from this schema."""

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
    def _with_atropos(cls, values: Any) -> Any:
        return with_atropos(values)

    def problems(self) -> Problems:
        return _problems(self)

    def all_problems(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for name in RESERVED:
            for problem in library_problems(name, getattr(self, name) or {}):
                yield (name,), problem
        yield from super().all_problems()

    # What follows from the above, and therefore cannot be set.

    @property
    def by_environment(self) -> dict[str, EnvironmentSection]:
        """The environments by the names that rows have for them; that of the section `environment` is empty."""
        alone = {"": self.environment} if self.environment.is_given else {}
        return {each.name: each for each in self.environments} or alone

    @property
    def may_skip(self) -> tuple[str, ...]:
        """The environments that the run may go on without."""
        return tuple(each.name for each in self.environments if each.on_failure == "skip")

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
        functions = [each for each in self.rewards.functions if each.posted is not None and each.scores(environment)]
        own = {REWARD_NAME: environment or REWARD_NAME} if section.is_played_outside else {}
        return {each.name: each.name for each in functions} | own

    @property
    def posted_rewards(self) -> tuple[str, ...]:
        """The columns of all rewards that agents post."""
        posted = [name for each in self.routes or ("",) for name in self.posted_by(each).values()]
        return tuple(name for name in self.reward_names if name in {*posted, *self.rewards.posted})

    @property
    def reward_weights(self) -> tuple[float, ...]:
        return (*(function.weight for function in self.rewards.functions), *self.own_rewards.values())

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
        """Tell whether the adapter begins with a part of the base, as that of PiSSA does."""
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
        """Tell whether several ranks share the weights that train."""
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
        """Tell whether merged weights are rounded to a format that swallows small updates."""
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


def _problems(config: RunConfig) -> Problems:
    yield from lora_section.patch_problems(config)
    yield from _of_rewards(config)
    yield from _of_teachers(config)
    yield from _of_answers(config)
    yield from environment_problems(config)
    yield from _of_evaluation(config)
    if config.engine_server is not None:
        yield from _of_engine_server(config)
    yield from _of_stops(config)
    yield from _of_quantization(config)
    if config.pipeline.gpu == "shared" and config.engine.get("kv_cache_memory_bytes"):
        yield (
            "engine.kv_cache_memory_bytes: vLLM takes it whatever its share of the GPU is, and with pipeline.gpu=shared the "
            "trainer has the rest; set engine.gpu_memory_utilization instead"
        )
    if config.pipeline.gpu == "turns":
        yield from _of_turns(config)
    limit = config.sampling.max_completion_length
    if config.advantage.overlong_buffer_tokens > limit:
        yield (
            f"advantage.overlong_buffer_tokens={config.advantage.overlong_buffer_tokens} is more than "
            f"sampling.max_completion_length={limit}"
        )
    if config.control_endpoint == config.blob_endpoint:
        yield f"transport.endpoint and transport.blob_endpoint are both {config.blob_endpoint}; change one"


def _of_rewards(config: RunConfig) -> Problems:
    own = config.environment
    if not config.reward_names and (config.distillation is None or not config.distillation.alone):
        yield (
            "rewards.functions: nothing scores the completions; name a reward function, or set environment.reward_weight for "
            "an environment that has get_reward, or distillation.alone where teachers teach all"
        )
    if own.reward_weight is not None and not own.is_given:
        yield "environment.reward_weight: there is no environment.factory"
    if REWARD_NAME in config.rewards.names and REWARD_NAME in config.own_rewards:
        yield f"rewards.functions: {REWARD_NAME!r} is what the environment's own reward is called"
    if (
        config.weights == "adapter"
        and config.probe_every
        and "lm_head" in (config.lora_section["target_modules"] or ())
    ):
        yield (
            "lora.target_modules: vLLM cannot score the probe of a swap under an adapter of lm_head; set swap.mode=merged, or "
            "swap.probe_every=0, or leave lm_head out"
        )
    if config.dataset.curriculum is not None and not config.reward_names:
        yield "dataset.curriculum: nothing scores completions; name reward functions, or remove it"
    reward = config.reroll.reward
    if reward is not None and reward not in config.reward_names:
        yield f"reroll.reward: {reward!r} is not one of rewards.functions: {', '.join(config.reward_names)}"
    for number, source in enumerate(config.dataset.sources):
        if source.judge is not None and source.judge not in config.reward_names:
            yield (
                f"dataset.sources.{number}.judge: {source.judge!r} is not one of rewards.functions: "
                f"{', '.join(config.reward_names)}"
            )


def _of_teachers(config: RunConfig) -> Problems:
    names, section = [teacher.name for teacher in config.teachers], config.distillation
    if bool(names) != (section is not None):
        yield "teachers and distillation need each other; give both, or remove one"
    if len(set(names)) < len(names):
        yield "teachers: two of them have one name; metrics need different names"
    if section is not None and (config.sampling.temperature != 1.0 or config.sampling.accept_biased_ratios):
        yield (
            "sampling: log-probs of a teacher are those at temperature 1, of all tokens; set temperature=1.0 and remove "
            "accept_biased_ratios"
        )
    own = [number for number, teacher in enumerate(config.teachers) if teacher.prompt is not None]
    if own and (config.by_environment or config.posted_rewards):
        yield (
            f"teachers.{own[0]}.prompt: it stands in place of the row's prompt, and environments and agents make their own; "
            "remove it, or give a url"
        )
    if own and section is not None and section.mode != "advantage":
        yield f"teachers.{own[0]}.prompt: the policy itself teaches with distillation.mode: advantage only; set it, or give a url"
    if section is not None and section.alone and config.rewards.credit != "outcome":
        yield "rewards.credit: with distillation.alone rewards teach nothing; remove one of them"
    if config.sampling.num_generations == 1 and not (
        section is not None and section.alone and config.pipeline.groups_per_step > 1
    ):
        yield (
            "sampling.num_generations: rewards teach by comparing at least 2 completions; only with distillation.alone, and "
            "pipeline.groups_per_step of 2 or more, may it be 1"
        )


def _of_answers(config: RunConfig) -> Problems:
    """Yield the settings that leave `loss` without what it takes from rows."""
    if config.loss.weights_column is not None and config.environment.atropos:
        yield "loss.weights_column: items of Atropos' environments have no rows with columns; remove the key"
    if config.loss.ce_coef and config.by_environment:
        yield (
            "loss.ce_coef: in an environment an answer is a whole episode, which a column does not have; remove one of them"
        )
    if config.loss.ce_coef and all(source.answer_column is None for source in config.dataset.all_sources.values()):
        yield "loss.ce_coef: no column has the reference answers; set dataset.answer_column, or remove ce_coef"


def _of_quantization(config: RunConfig) -> Problems:
    if config.model.quantization is not None and config.pipeline.shard_base == "layers":
        yield (
            f"model.quantization: weights in {config.model.quantization} cannot be spread over ranks and gathered again; set "
            "pipeline.shard_base=none, or remove model.quantization"
        )
    if config.engine.get("quantization") and config.weights == "merged":
        yield (
            "engine.quantization: quantized weights cannot take up an adapter without another rounding; set swap.mode=adapter, "
            "or remove it"
        )


def _of_turns(config: RunConfig) -> Problems:
    """Yield the settings that do not move between a GPU and host memory."""
    if config.pipeline.shard_base == "layers":
        yield "pipeline.shard_base: layers is for several GPUs, and pipeline.gpu=turns for one; remove one of them"
    if config.model.quantization is not None:
        yield (
            f"model.quantization: weights in {config.model.quantization} stay on the GPU, and with pipeline.gpu=turns the "
            "trainer's leave it; remove one of them"
        )
    if str(config.trainer.get("optim", "")).startswith("paged_"):
        yield "trainer.optim: a paged optimizer moves its own state, and pipeline.gpu=turns moves it, too; use adamw_torch"
    options = config.trainer.get("model_init_kwargs")
    if isinstance(options, dict) and "flash" in str(options.get("attn_implementation", "")):
        yield (
            "trainer.model_init_kwargs.attn_implementation: with pipeline.gpu=turns the model is loaded in host memory, where "
            "flash attention does not run; use sdpa"
        )


def _of_stops(config: RunConfig) -> Problems:
    sampling = config.sampling
    given = [
        name for name in ("stop", "stop_token_ids", "ignore_eos", "regex", "json_schema") if getattr(sampling, name)
    ]
    if given and any(each.factory is not None for each in config.by_environment.values()):
        yield f"sampling.{given[0]}: in an environment the chat template ends a turn; remove it"
    lasting = [name for name in ("stop", "regex", "json_schema") if getattr(sampling, name)]
    if lasting and config.weights == "adapter" and config.on_swap == "continue":
        yield (
            f"sampling.{lasting[0]}: swap.in_flight=continue cuts completions, and what lies on both sides of a cut would not be "
            "seen; set swap.in_flight=finish or restart"
        )
    if (
        sampling.ignore_eos
        and not (sampling.stop or sampling.stop_token_ids)
        and config.trainer.get("mask_truncated_completions")
    ):
        yield (
            "sampling.ignore_eos: nothing ends a completion before max_completion_length, and "
            "trainer.mask_truncated_completions would mask all of them; give sampling.stop or stop_token_ids, or remove one"
        )


def _of_evaluation(config: RunConfig) -> Problems:
    if config.evaluation is None:
        return
    if not config.reward_names:
        yield "evaluation: nothing scores the answers; name reward functions, or remove the section"
    known = (WEIGHTED_SUM, *config.reward_names)
    if config.evaluation.metric not in known:
        yield f"evaluation.metric: {config.evaluation.metric!r} is not one of the rewards (rewards.functions): {', '.join(known)}"
    if any(source.answer_column is not None for source in config.evaluation.dataset.all_sources.values()):
        yield "evaluation.dataset.answer_column: answers to held-out prompts are not trained; remove the key"
    if any(source.judge is not None for source in config.evaluation.dataset.sources):
        yield "evaluation.dataset.sources: held-out prompts do not return, so nothing judges them; remove `judge`"
    if config.evaluation.dataset.curriculum is not None:
        yield "evaluation.dataset.curriculum: all held-out prompts are asked; remove the key"
    if config.evaluation.dataset.sampling != "fixed":
        yield "evaluation.dataset.sampling: all held-out prompts are asked; remove the key"
    if config.evaluation.dataset.chat_template_kwargs not in ({}, config.dataset.chat_template_kwargs):
        yield (
            "evaluation.dataset.chat_template_kwargs: prompts of both datasets are rendered alike; give them in "
            "dataset.chat_template_kwargs alone"
        )


def _of_engine_server(config: RunConfig) -> Problems:
    """Yield the settings that need more than vLLM's HTTP API does or proves."""
    if config.engine:
        yield (
            "engine: these are arguments of an engine of the producer's own, and engine_server names one that is running; give "
            "them to that server as flags, and remove one of the two sections (`--set engine={}`)"
        )
    if config.weights == "merged":
        yield "swap.mode: merged changes an engine's own weights, and a server can only be given adapters; use adapter"
    if config.on_swap != "finish":
        yield (
            f"swap.in_flight: {config.on_swap} cuts requests, and a server does not return what a request that is cut has "
            "sampled; use finish"
        )
    if config.probe_every != 1:
        yield (
            f"swap.probe_every={config.probe_every}: nothing but the probe proves the weights of a server, so every version "
            "needs one; set it to 1"
        )
    if config.pipeline.gpu != "own":
        yield (
            f"pipeline.gpu: {config.pipeline.gpu} is for an engine of the producer's own, and a server takes what its flags say; "
            "use own"
        )
    if config.serve.enabled:
        yield (
            "serve.enabled: the endpoint notes what an engine of the producer's own samples for clients, which a server does not "
            "tell; remove engine_server, or serve and whatever needs it"
        )
