"""The schema of the one configuration file that both daemons read.

Guarantee: a `RunConfig` that exists is complete and consistent; every value that follows from others is a property here
and cannot be set. The sections `engine`, `lora` and `trainer` keep the names of the library they belong to (vLLM engine
arguments, peft.LoraConfig, trl.GRPOConfig) and are validated by that library when its daemon starts; here only the keys
that Slipstream sets itself are refused.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from protocol.library_rules import LORA_DEFAULTS, SERVABLE_RANKS, check_engine, check_lora, check_trainer

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_switch_for_number(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        result = validate(value)
        if isinstance(value, bool) and not isinstance(result, bool):
            raise ValueError("expected a number, not a switch")
        return result


def _place_and_name(value: str) -> str:
    place, _, name = value.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError("expected `module:function` or `path/to/file.py:function`")
    return value


class ModelSection(Section):
    path: str = Field(description="Base model: a local folder or a hub name, in transformers format.")
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="Dtype of the base weights, in the engine and in the trainer. LoRA weights train in fp32.",
    )


class DatasetSection(Section):
    path: str = Field(
        description="Anything `datasets.load_dataset` takes: a hub name, or a local .jsonl, .json, .csv or .parquet file, "
        "or a folder written by `save_to_disk`."
    )
    name: str | None = Field(None, description="Configuration of a hub dataset, e.g. `main` for openai/gsm8k.")
    split: str = Field("train", description="Split to train on.")
    prompt_column: str = Field(
        "prompt",
        description="Column with the prompt: a string, or a list of chat messages. All other columns reach the "
        "reward functions.",
    )
    transform: str | None = Field(
        None,
        description="`module:function` or `file.py:function` applied to every row (dict -> dict) before the prompt "
        "column is looked up.",
    )
    shuffle: bool = Field(True, description="Shuffle the prompts anew every epoch, from `seed`.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the chat template, e.g. `enable_thinking: false`."
    )

    @field_validator("transform")
    @classmethod
    def _has_both_parts(cls, value: str | None) -> str | None:
        return None if value is None else _place_and_name(value)


class RewardFunction(Section):
    function: str = Field(
        description="`module:function` or `file.py:function` with TRL's signature: "
        "`def reward(prompts, completions, completion_ids, **columns) -> list[float | None]`."
    )
    weight: float = Field(1.0, description="Weight in the sum of rewards.")

    @field_validator("function")
    @classmethod
    def _has_both_parts(cls, value: str) -> str:
        return _place_and_name(value)

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]


class RewardsSection(Section):
    functions: list[RewardFunction] = Field(min_length=1, description="The reward functions.")
    timeout_s: PositiveSeconds = Field(
        30.0, description="Hard limit of one call of one function on one group; the worker is then killed and replaced."
    )
    num_workers: Positive = Field(2, description="Reward worker processes of a producer.")

    @field_validator("functions")
    @classmethod
    def _names_differ(cls, functions: list[RewardFunction]) -> list[RewardFunction]:
        names = [f.name for f in functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward functions are called {name!r}: metrics need different names")
        return functions

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions, in order: the columns of every reward array."""
        return tuple(function.name for function in self.functions)


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


class PipelineSection(Section):
    groups_per_step: Positive = Field(16, description="Groups with signal that make one optimizer step.")
    max_staleness: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = Field(
        1,
        description="Oldest policy a group may come from when it is trained, in versions. 0 is exactly on-policy; `auto` "
        "moves it within `auto_staleness`.",
    )
    auto_staleness: tuple[Annotated[int, Field(ge=0, le=64)], Annotated[int, Field(ge=0, le=64)]] = Field(
        (1, 4),
        description="Least and greatest staleness of `max_staleness: auto`. The greatest bounds what is trained, and the "
        "LoRA slots of the engine follow from it.",
    )
    auto_min_effective_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5,
        description="`max_staleness: auto` narrows when the effective sample size falls below this share of the tokens.",
    )
    fill: Literal["full", "partial"] = Field(
        "full",
        description="Batches have `groups_per_step` groups with signal, always; or (`partial`) what there is once the "
        "trainer has waited `fill_timeout_s`.",
    )
    fill_timeout_s: PositiveSeconds = Field(60.0, description="See fill.")
    sync_interval: Positive = Field(1, description="Optimizer steps per published policy version.")
    lease_timeout_s: PositiveSeconds = Field(
        600.0, description="A prompt whose group has not come back by then is leased again."
    )
    max_data_attempts: Positive = Field(
        3,
        description="Failures of a prompt's own making (its reward raises or times out) before it becomes a dead letter "
        "for this epoch. A malformed or too long prompt becomes one at once.",
    )
    max_infra_attempts: Positive = Field(
        10,
        description="Failures that are not the prompt's (a lease expired, a producer died, the engine failed) before it "
        "becomes a dead letter for this epoch.",
    )
    data_backoff_s: PositiveSeconds = Field(
        1.0, description="Wait before a prompt goes out again after a data failure; doubles each time, up to 60 s."
    )
    infra_backoff_s: PositiveSeconds = Field(0.25, description="The same after an infrastructure failure.")
    max_failed_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="The run stops when more than this share of the last 64 finished prompts are dead letters."
    )
    stall_timeout_s: PositiveSeconds = Field(
        1800.0, description="Either daemon stops when it had work to wait for and saw no progress for so long."
    )

    @field_validator("auto_staleness")
    @classmethod
    def _in_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError("the least staleness comes first")
        return value

    @property
    def partial_after_s(self) -> float | None:
        """How long the trainer waits for a full batch before a partial one will do; None: for ever."""
        return self.fill_timeout_s if self.fill == "partial" else None

    @property
    def staleness_limit(self) -> int:
        """The staleness that nothing trained for the first time ever exceeds."""
        return self.auto_staleness[1] if self.max_staleness == "auto" else self.max_staleness


class ReplaySection(Section):
    mode: Literal["fifo", "signal"] = Field(
        "fifo",
        description="`fifo`: groups are trained in the order they came, each once. `signal`: beside that, groups whose "
        "rewards differed stand in again for groups whose rewards did not, so that batches fill sooner.",
    )
    sampler: Literal["fifo", "freshest", "prioritized"] = Field(
        "prioritized",
        description="Which group stands in: the first that came, the newest policy's, or at random in proportion to its "
        "score (the sum of its rewards' distances from their mean, halved every `half_life_versions`).",
    )
    remover: Literal["oldest", "lowest_score"] = Field(
        "lowest_score", description="Which group makes room when `max_size` are kept."
    )
    max_size: Positive = Field(256, description="Groups kept to stand in.")
    min_size: Positive = Field(16, description="Groups kept before the first one stands in.")
    samples_per_insert: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="Groups trained per group generated, at most, counting every time. 1 lets a group stand in for every "
        "one without signal.",
    )
    max_times_sampled: Annotated[int, Field(ge=2)] = Field(
        4, description="Times that one group is trained, the first one included."
    )
    max_age_versions: Positive = Field(16, description="Versions after which a group does not stand in any more.")
    half_life_versions: Annotated[float, Field(gt=0)] = Field(4.0, description="Age at which a score counts half.")
    max_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Share of a batch that may stand in; the rest is trained for the first time."
    )
    keep_all: bool = Field(
        False,
        description="Never delete a group from the journal, so that `rl-trainer --from-journal` can retrain the run.",
    )
    keep_bytes: Annotated[int, Field(ge=0)] = Field(
        2**30,
        description="Groups that no checkpoint needs any more are kept for inspection up to so many bytes, newest first.",
    )
    keep_age_s: PositiveSeconds = Field(
        7 * 86_400.0, description="Groups that no checkpoint needs any more are kept for inspection for so long."
    )
    max_disk_used: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9,
        description="No leases are given while the disk of run_dir is fuller than this share; they resume by themselves.",
    )

    @model_validator(mode="after")
    def _can_be_sampled(self) -> "ReplaySection":
        if self.min_size > self.max_size:
            raise ValueError(
                f"min_size={self.min_size} is above max_size={self.max_size}, so no group could ever stand in: lower "
                "min_size or raise max_size"
            )
        return self


class RerollSection(Section):
    max_attempts: Annotated[int, Field(ge=0, le=1000)] = Field(
        2,
        description="Times that a prompt comes back in an epoch after a group in which every completion failed. 0: never.",
    )
    reward: str | None = Field(
        None, description="Reward function that says what failed, by name. Default: the first one."
    )
    fail_threshold: float = Field(
        0.0, description="A completion failed when that reward, unweighted, is at or below this."
    )
    solved_threshold: float = Field(1.0, description="A completion solved its prompt when it is at or above this.")
    delay_versions: Positive = Field(
        4, description="A failed prompt returns when the policy is so many versions newer than the one that failed."
    )
    max_share: Annotated[float, Field(gt=0, lt=1)] = Field(0.25, description="Share of the leases that are rerolls.")
    max_pending: Positive = Field(4096, description="Prompts that wait to return; the longest waiting give way.")
    solved_cooldown_epochs: Annotated[int, Field(ge=0)] = Field(
        0, description="Epochs that a prompt sits out after a group in which every completion solved it."
    )

    @model_validator(mode="after")
    def _thresholds_apart(self) -> "RerollSection":
        if self.fail_threshold >= self.solved_threshold:
            raise ValueError("fail_threshold must be below solved_threshold")
        return self


class AdvantageSection(Section):
    baseline: Literal["group", "leave_one_out"] = Field(
        "group", description="What a reward is compared with: the mean of its group, or of the others in it (RLOO)."
    )
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Soft overlong punishment (DAPO): the penalty grows from 0 to `overlong_penalty` over the last so many "
        "tokens before max_completion_length. 0: none.",
    )
    overlong_penalty: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Penalty of a completion of full length, taken from its reward."
    )


Preset = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
    "icepop",
]


class CorrectionSection(Section):
    preset: Preset = Field(
        "token_truncate",
        description="Importance correction from sampling log-probs: level of the ratio and what happens outside its "
        "bounds. docs/algorithms.md has the formulas and says which to take when.",
    )
    ratio_min: Annotated[float, Field(ge=0)] | None = Field(None, description="Lower bound. Default: the preset's.")
    ratio_max: Annotated[float, Field(gt=0)] | None = Field(None, description="Upper bound. Default: the preset's.")
    token_veto: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="A completion is masked when the ratio of any of its tokens is below this."
    )
    probability_difference_max: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="DPPO: a token is masked when its probability has moved by more than this from the sampler's in the "
        "direction of its advantage.",
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "CorrectionSection":
        if self.ratio_min is not None and self.ratio_max is not None and self.ratio_min >= self.ratio_max:
            raise ValueError("ratio_min must be below ratio_max")
        return self


class TransportSection(Section):
    endpoint: str | None = Field(
        None,
        description="Control channel, `ipc:///path` or `tcp://127.0.0.1:PORT`. Default: `ipc://RUN_DIR/control.ipc`.",
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

    @field_validator("endpoint", "blob_endpoint")
    @classmethod
    def _private(cls, value: str | None) -> str | None:
        if value is None or (value.startswith("ipc://") and value != "ipc://"):
            return value
        host, separator, port = value.removeprefix("tcp://").rpartition(":")
        if not value.startswith("tcp://") or not separator or not port.isdigit() or not 0 < int(port) < 65_535:
            raise ValueError("expected `ipc:///path` or `tcp://HOST:PORT`")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            raise ValueError(
                f"{host} can be reached from other hosts and this release has no authentication, so it is refused. "
                "Use 127.0.0.1 (and an SSH tunnel between hosts)"
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


class RunConfig(Section):
    """One run. See docs/configuration.md, which is generated from this schema."""

    run_dir: str = Field(description="Folder of the run: checkpoints, logs, sockets.")
    seed: int = Field(42, description="Seed of prompt order, sampling, LoRA initialization and torch.")
    model: ModelSection
    dataset: DatasetSection
    rewards: RewardsSection
    sampling: SamplingSection = SamplingSection()  # type: ignore[call-arg]
    pipeline: PipelineSection = PipelineSection()  # type: ignore[call-arg]
    replay: ReplaySection = ReplaySection()  # type: ignore[call-arg]
    reroll: RerollSection = RerollSection()  # type: ignore[call-arg]
    advantage: AdvantageSection = AdvantageSection()  # type: ignore[call-arg]
    correction: CorrectionSection = CorrectionSection()  # type: ignore[call-arg]
    transport: TransportSection = TransportSection()  # type: ignore[call-arg]
    observability: ObservabilitySection = ObservabilitySection()  # type: ignore[call-arg]
    lora: dict[str, Any] = Field(
        default_factory=lambda: dict(LORA_DEFAULTS),
        description="peft.LoraConfig. DoRA, biases and modules_to_save are refused: vLLM cannot serve them.",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments.")
    trainer: dict[str, Any] = Field(default_factory=dict, description="trl.GRPOConfig.")

    @field_validator("engine", "trainer", "lora")
    @classmethod
    def _check_library_section(cls, value: dict[str, Any], info: Any) -> dict[str, Any]:
        check = {"engine": check_engine, "trainer": check_trainer, "lora": check_lora}[info.field_name]
        return check(value)

    @model_validator(mode="after")
    def _micro_batches_divide(self) -> "RunConfig":
        size = self.trainer.get("per_device_train_batch_size", self.completions_per_step)
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"trainer.per_device_train_batch_size: expected a whole number (got {size!r})")
        if size < 1 or self.completions_per_step % size:
            raise ValueError(
                f"trainer.per_device_train_batch_size={size} must divide the {self.completions_per_step} completions of a "
                "step (pipeline.groups_per_step x sampling.num_generations)"
            )
        return self

    @model_validator(mode="after")
    def _known_reward(self) -> "RunConfig":
        if self.reroll.reward is not None and self.reroll.reward not in self.rewards.names:
            raise ValueError(
                f"reroll.reward: {self.reroll.reward!r} is not one of rewards.functions: {', '.join(self.rewards.names)}"
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
    def completions_per_step(self) -> int:
        return self.pipeline.groups_per_step * self.sampling.num_generations

    @property
    def micro_batch_size(self) -> int:
        """Completions per forward and backward pass."""
        return int(self.trainer.get("per_device_train_batch_size", self.completions_per_step))

    @property
    def max_lora_rank(self) -> int:
        """The smallest rank that vLLM serves and that holds `lora.r`."""
        return min(rank for rank in SERVABLE_RANKS if rank >= self.lora["r"])

    @property
    def max_loras(self) -> int:
        """Adapters that may be needed at once: every version that a live request can name, and the one being loaded."""
        return self.pipeline.staleness_limit + 2

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
