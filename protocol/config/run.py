"""The schema of the one configuration file that both daemons read.

Guarantee: a `RunConfig` that exists is complete and consistent; every value that follows from others is a property here
and cannot be set. The sections `engine`, `lora`, `trainer` and `sft` keep the names of the library they belong to (vLLM engine
arguments, peft.LoraConfig, trl.GRPOConfig, trl.SFTConfig). Here only the keys that Slipstream sets itself are refused, and its
own are checked (protocol/config/library_rules.py); names and plain types are checked where the file is read
(protocol/config/library_fields.py), the rest by that library when its daemon starts.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from protocol.config.dataset import DatasetSection
from protocol.config.environment import ATROPOS_ITEMS, REWARD_NAME, EnvironmentSection, with_atropos
from protocol.config.evaluation import WEIGHTED_SUM, EvaluationSection
from protocol.config.guards import GuardsSection
from protocol.config.learning import (
    AdvantageSection,
    CorrectionSection,
    PipelineSection,
    ReplaySection,
    RerollSection,
)
from protocol.config.library_rules import (
    LORA_DEFAULTS,
    SERVABLE_RANKS,
    check_engine,
    check_lora,
    check_sft,
    check_trainer,
)
from protocol.config.rewards import RewardsSection
from protocol.config.section import PositiveSeconds, Section
from protocol.config.serve import ServeSection
from protocol.config.swap import SwapSection


class ModelSection(Section):
    path: str = Field(description="Base model: a local folder or a hub name, in transformers format.")
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    trust_remote_code: bool = Field(
        False,
        description="Run the Python files that come with the model, where its classes or its tokenizer are not part of "
        "transformers. Both daemons do, as the user that runs them; see docs/security.md.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="Dtype of the base weights, in the engine and in the trainer. LoRA weights train in fp32.",
    )


class SamplingSection(Section):
    num_generations: Annotated[int, Field(ge=2, le=4096)] = Field(8, description="Completions per prompt (the group).")
    max_completion_length: Annotated[int, Field(ge=1, le=2**24)] = Field(
        256, description="Longest completion, in tokens."
    )
    temperature: Annotated[float, Field(gt=0, le=100)] = Field(1.0, description="Applied on both sides.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling; see accept_biased_ratios.")
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="Top-k sampling, 0 is off; see accept_biased_ratios.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="Min-p sampling; see accept_biased_ratios.")
    accept_biased_ratios: bool = Field(
        False,
        description="Accept top_p, top_k or min_p although the trainer cannot reproduce their renormalized "
        "distribution, which biases every importance ratio.",
    )

    @model_validator(mode="after")
    def _ratios_exact(self) -> "SamplingSection":
        changed = [
            f"{key}={getattr(self, key)}"
            for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
            if getattr(self, key) != off
        ]
        if changed and not self.accept_biased_ratios:
            raise ValueError(
                f"{', '.join(changed)} changes the sampling distribution in a way the trainer does not reproduce, so "
                "importance ratios would be biased. Remove it, or set sampling.accept_biased_ratios=true"
            )
        return self


class TransportSection(Section):
    keys: str | None = Field(
        None,
        description="Folder of keys, made by `rl-keys`: only authorized producers connect, and everything is encrypted. "
        "Needed for an endpoint that other hosts can reach. See docs/security.md.",
    )
    identity: str | None = Field(None, description="Name of the producer's key. Default: the name of its host.")
    endpoint: str | None = Field(
        None,
        description="Control channel, `ipc:///path` or `tcp://HOST:PORT`. Default: `ipc://RUN_DIR/control.ipc`.",
    )
    blob_endpoint: str | None = Field(
        None, description="Channel for adapters. Default: the ipc path with `.blobs`, or the next tcp port."
    )
    heartbeat_interval_s: PositiveSeconds = Field(1.0, description="How often a producer reports.")
    heartbeat_timeout_s: PositiveSeconds = Field(6.0, description="Silence after which the other side counts as gone.")
    max_message_bytes: Annotated[int, Field(ge=65_536, le=2**31 - 1)] = Field(
        64 * 2**20, description="Largest frame accepted or sent."
    )
    blob_chunk_bytes: Annotated[int, Field(ge=1024, le=2**26)] = Field(2**20, description="Adapter bytes per message.")
    max_unacked_bytes: Annotated[int, Field(ge=0)] = Field(
        256 * 2**20,
        description="A producer begins no new generation while it holds more bytes of groups that the trainer has not "
        "acknowledged.",
    )

    @field_validator("keys", "identity")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("expected a name, or nothing at all")
        return value

    @field_validator("endpoint", "blob_endpoint")
    @classmethod
    def _private(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or (value.startswith("ipc://") and value != "ipc://"):
            return value
        host, separator, port = value.removeprefix("tcp://").rpartition(":")
        if not value.startswith("tcp://") or not separator or not port.isdigit() or not 0 < int(port) < 65_535:
            raise ValueError("expected `ipc:///path` or `tcp://HOST:PORT`")
        if host not in ("127.0.0.1", "localhost", "[::1]") and not info.data.get("keys"):
            raise ValueError(
                f"{host} can be reached from other hosts, so it needs keys. Set transport.keys=keys after `rl-keys generate "
                "trainer`, `rl-keys generate PRODUCER` and `rl-keys authorize PRODUCER` (docs/security.md), or use 127.0.0.1"
            )
        return value

    @model_validator(mode="after")
    def _timeout_above_interval(self) -> "TransportSection":
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout_s must be at least twice heartbeat_interval_s")
        if self.max_message_bytes < 2 * self.blob_chunk_bytes:
            raise ValueError("max_message_bytes must be at least twice blob_chunk_bytes")
        return self


class ObservabilitySection(Section):
    progress: bool = Field(True, description="Progress bar on a terminal; one line per step elsewhere.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the daemons' logs.")
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="`auto`: one JSON object per line under systemd, text elsewhere."
    )
    metrics_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address at which each daemon serves `/metrics`, `/healthz` and `/readyz`. They show numbers, no prompts "
        "and no keys, to everybody who can reach it.",
    )
    trainer_metrics_port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        0,
        description="0: a free one. The port in use is in `RUN_DIR/metrics/`, where Prometheus and rl-status find it.",
    )
    producer_metrics_port: Annotated[int, Field(ge=0, le=65_000)] = Field(
        0, description="The same for a producer, which adds the index of its first GPU to a port other than 0."
    )
    unresponsive_after_s: PositiveSeconds = Field(
        120.0, description="`/healthz` turns red when the working loop of a daemon has not come round for so long."
    )
    rollout_samples: Annotated[int, Field(ge=0, le=1024)] = Field(
        2, description="Completions per step that the trainer writes to `RUN_DIR/rollouts.jsonl`; 0: none."
    )
    rollouts_max_bytes: Annotated[int, Field(ge=65_536)] = Field(
        64 * 2**20,
        description="Size of `rollouts.jsonl` at which it becomes `rollouts.1.jsonl`, in place of the one before.",
    )


class RunConfig(Section):
    """One run. See docs/configuration.md, which is generated from this schema."""

    run_dir: str = Field(description="Folder of the run: checkpoints, logs, sockets.")
    seed: Annotated[int, Field(ge=0)] = Field(
        42, description="Seed of prompt order, sampling, LoRA initialization and torch."
    )
    model: ModelSection
    dataset: DatasetSection
    rewards: RewardsSection = RewardsSection()  # type: ignore[call-arg]
    environment: EnvironmentSection = EnvironmentSection()  # type: ignore[call-arg]
    sampling: SamplingSection = SamplingSection()  # type: ignore[call-arg]
    pipeline: PipelineSection = PipelineSection()  # type: ignore[call-arg]
    replay: ReplaySection = ReplaySection()  # type: ignore[call-arg]
    reroll: RerollSection = RerollSection()  # type: ignore[call-arg]
    advantage: AdvantageSection = AdvantageSection()  # type: ignore[call-arg]
    correction: CorrectionSection = CorrectionSection()  # type: ignore[call-arg]
    swap: SwapSection = SwapSection()  # type: ignore[call-arg]
    serve: ServeSection = ServeSection()  # type: ignore[call-arg]
    transport: TransportSection = TransportSection()  # type: ignore[call-arg]
    observability: ObservabilitySection = ObservabilitySection()  # type: ignore[call-arg]
    guards: GuardsSection = GuardsSection()  # type: ignore[call-arg]
    evaluation: EvaluationSection | None = Field(
        None, description="A held-out set, scored by the producers every so many versions. Without it there is none."
    )
    lora: dict[str, Any] = Field(
        default_factory=lambda: dict(LORA_DEFAULTS),
        description="peft.LoraConfig. DoRA, biases and modules_to_save are refused: vLLM cannot serve them.",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments.")
    trainer: dict[str, Any] = Field(default_factory=dict, description="trl.GRPOConfig.")
    sft: dict[str, Any] = Field(default_factory=dict, description="trl.SFTConfig, of `rl-sft`.")

    @field_validator("engine", "trainer", "lora", "sft")
    @classmethod
    def _check_library_section(cls, value: dict[str, Any], info: Any) -> dict[str, Any]:
        check = {"engine": check_engine, "trainer": check_trainer, "lora": check_lora, "sft": check_sft}[
            info.field_name
        ]
        return check(value)

    @field_validator("environment", mode="before")
    @classmethod
    def _factory_alone(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _with_atropos(cls, values: Any) -> Any:
        return with_atropos(values)

    @model_validator(mode="after")
    def _something_scores(self) -> "RunConfig":
        if not self.reward_names:
            raise ValueError(
                "rewards.functions: nothing scores the completions; name a reward function, or set environment.reward_weight for "
                "an environment that has get_reward"
            )
        own = self.environment
        if own.reward_weight is not None and not own.is_given:
            raise ValueError("environment.reward_weight: there is no environment.factory")
        if REWARD_NAME in self.rewards.names and self.environment.own_weight is not None:
            raise ValueError(f"rewards.functions: {REWARD_NAME!r} is what the environment's own reward is called")
        return self

    @model_validator(mode="after")
    def _can_be_proved(self) -> "RunConfig":
        if self.swap.mode == "adapter" and self.swap.probe_every and "lm_head" in (self.lora["target_modules"] or ()):
            raise ValueError(
                "lora.target_modules: vLLM cannot score the probe of a swap under an adapter of lm_head; set "
                "swap.mode=merged, or swap.probe_every=0, or leave lm_head out"
            )
        return self

    @model_validator(mode="after")
    def _known_reward(self) -> "RunConfig":
        if self.reroll.reward is not None and self.reroll.reward not in self.reward_names:
            raise ValueError(
                f"reroll.reward: {self.reroll.reward!r} is not one of rewards.functions: {', '.join(self.reward_names)}"
            )
        return self

    @model_validator(mode="after")
    def _agents_can_work(self) -> "RunConfig":
        posted = ", ".join(self.posted_rewards)
        if self.environment.is_played_outside and not self.serve.enabled:
            raise ValueError(
                "environment: its episodes are played through the endpoint, which is off; set serve.enabled=true"
            )
        if posted and not self.serve.enabled:
            raise ValueError(
                f"rewards.functions: agents post {posted} to the endpoint, which is off; set serve.enabled=true"
            )
        if posted and self.environment.factory is not None:
            raise ValueError(
                f"environment: agents that post {posted} have their own; remove the section, or that reward"
            )
        if self.environment.nemo_gym is not None and self.serve.port == 0:
            raise ValueError(
                "environment.nemo_gym: its model server has to know where the policy is; set serve.port, and its base URL to "
                "http://HOST:PORT/v1"
            )
        if posted and self.evaluation is not None:
            raise ValueError(
                f"evaluation: nobody would post {posted} for completions that producers generate; remove the section"
            )
        return self

    @model_validator(mode="after")
    def _atropos_can_work(self) -> "RunConfig":
        if not self.environment.atropos:
            return self
        rows = {"path": ATROPOS_ITEMS, "chat_template_kwargs": self.dataset.chat_template_kwargs}
        wrong = {
            "serve.enabled: environments of Atropos generate through the endpoint, which is off; set it": not self.serve.enabled,
            "rewards.functions: environments of Atropos score their groups; remove them": bool(self.rewards.functions),
            "dataset: environments of Atropos have their own items; remove the section, but for chat_template_kwargs": (
                self.dataset != DatasetSection.model_validate(rows)
            ),
            "evaluation: nobody would score completions that producers generate; remove the section, environments of Atropos "
            "evaluate by themselves": self.evaluation is not None,
            "reroll: environments of Atropos choose their items; remove the section": bool(
                self.reroll.max_attempts or self.reroll.solved_cooldown_epochs
            ),
            "trainer.max_steps: needed, because without a dataset there are no epochs": (
                not isinstance(steps := self.trainer.get("max_steps"), int) or steps < 1
            ),
        }
        if problem := next((problem for problem, holds in wrong.items() if holds), None):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> "RunConfig":
        if self.evaluation is None:
            return self
        known = (WEIGHTED_SUM, *self.reward_names)
        if self.evaluation.metric not in known:
            raise ValueError(f"evaluation.metric: {self.evaluation.metric!r} is not one of {', '.join(known)}")
        if self.evaluation.dataset.chat_template_kwargs not in ({}, self.dataset.chat_template_kwargs):
            raise ValueError(
                "evaluation.dataset.chat_template_kwargs: prompts of both datasets are rendered alike; give them in "
                "dataset.chat_template_kwargs alone"
            )
        return self

    @model_validator(mode="after")
    def _overlong_fits(self) -> "RunConfig":
        if self.advantage.overlong_buffer_tokens > self.sampling.max_completion_length:
            raise ValueError(
                f"advantage.overlong_buffer_tokens={self.advantage.overlong_buffer_tokens} is more than "
                f"sampling.max_completion_length={self.sampling.max_completion_length}"
            )
        return self

    @model_validator(mode="after")
    def _endpoints_differ(self) -> "RunConfig":
        if self.control_endpoint == self.blob_endpoint:
            raise ValueError(
                f"transport.endpoint and transport.blob_endpoint are both {self.blob_endpoint}; change one"
            )
        return self

    # What follows from the above, and therefore cannot be set.

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The columns of every reward array: the functions in order, then the environment's own."""
        return self.rewards.names + ((REWARD_NAME,) if self.environment.own_weight is not None else ())

    @property
    def posted_rewards(self) -> tuple[str, ...]:
        """Those of these columns that agents post."""
        return self.rewards.posted + ((REWARD_NAME,) if self.environment.is_played_outside else ())

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """Of these columns."""
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
        """Adapters that training may need at once: every version that a live request can name, and the one being loaded."""
        return self.pipeline.staleness_limit + 2

    @property
    def max_loras(self) -> int:
        """Those, and the one that is evaluated."""
        return self.training_loras + (self.evaluation is not None)

    @property
    def control_endpoint(self) -> str:
        return self.transport.endpoint or f"ipc://{os.path.abspath(self.run_dir)}/control.ipc"

    @property
    def blob_endpoint(self) -> str:
        if self.transport.blob_endpoint:
            return self.transport.blob_endpoint
        if self.control_endpoint.startswith("ipc://"):
            return f"{self.control_endpoint}.blobs"
        host, _, port = self.control_endpoint.rpartition(":")
        return f"{host}:{int(port) + 1}"

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.run_dir) / "checkpoints"

    @property
    def journal_file(self) -> Path:
        return Path(self.run_dir) / "journal.sqlite"
