"""The sections that decide what is learned from: leases and batches, replay, rerolls, advantages, importance correction;
and when nothing is, and the run ends (`guards`).

docs/algorithms.md has the formulas behind them.
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol.config.section import Count, Positive, PositiveFloat, PositiveSeconds, Problems, Section, Share

ShardBase = Literal["auto", "none", "layers"]
GpuSharing = Literal["own", "shared", "turns"]
FIRST_TOKENS = 16_384  # of a pass under `trainer_tokens_per_micro_batch: auto`, before anything was measured
ENOUGH_TOKENS = 4096  # longer passes are hardly faster, and recomputing all layers costs half of a step again


class PipelineSection(Section):
    groups_per_step: Positive = Field(16, description="Groups of an optimizer step. See fill.")
    trainer_tokens_per_micro_batch: Annotated[int, Field(ge=1, le=2**31)] | Literal["auto"] = Field(
        "auto",
        description="Tokens of a pass of the trainer, shared ones once. Loss and gradient do not depend on it. `auto` "
        "begins with 16384 and follows the free memory.",
    )
    gpu: GpuSharing = Field(
        "own",
        description="`own`: trainer and producer have a GPU each; `shared`: they share one and its memory; `turns`: "
        "they use one alternately. See docs/one-gpu.md.",
    )
    gpu_handover_s: PositiveSeconds = Field(
        60.0,
        description="`gpu: turns`: time for producers to finish requests; after twice as long the run ends.",
    )
    shard_base: ShardBase = Field(
        "auto",
        description="`layers`: ranks share the base and gather each layer for a pass; `none`: each keeps all; "
        "`auto`: `layers` with `lora: null`, or if the base exceeds 60 % of a GPU's memory.",
    )
    rank_silence_s: Annotated[float, Field(ge=2, le=1e9)] | None = Field(
        None,
        description="Silence after which a rank of the trainer counts as lost (exit 77). Default: 6 on one host, 60 on several.",
    )
    max_staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        1,
        description="Oldest policy of a trained group, in versions. 0 is exactly on-policy.",
    )
    fill: Literal["sampled", "full"] = Field(
        "sampled",
        description="`sampled`: a step is taken when `groups_per_step` groups have come, if a quarter of them has signal; after "
        "twice as many, if one has. `full`: when as many have signal.",
    )
    sync_interval: Positive = Field(1, description="Optimizer steps per published policy version.")
    lease_timeout_s: PositiveSeconds = Field(
        600.0, description="A prompt whose group has not come back by then is leased again."
    )
    max_data_attempts: Positive = Field(
        3,
        description="Failures of a prompt (its reward raises or times out) before it is a dead letter. Malformed "
        "prompts are at once.",
    )
    max_infra_attempts: Positive = Field(
        10,
        description="Failures of the infrastructure (expired lease, dead producer or engine) before a prompt is a dead letter.",
    )
    data_backoff_s: PositiveSeconds = Field(
        1.0, description="Wait before a prompt is leased again after a data failure; doubles each time, up to 60 s."
    )
    infra_backoff_s: PositiveSeconds = Field(
        0.25, description="Like `data_backoff_s`, after an infrastructure failure."
    )
    max_failed_share: Share = Field(
        0.5, description="The run stops when more than this share of the last 64 finished prompts are dead letters."
    )
    stall_timeout_s: PositiveSeconds = Field(
        1800.0, description="A daemon stops (exit 75) after this time without progress."
    )


class ReplaySection(Section):
    mode: Literal["fifo", "signal"] = Field(
        "fifo",
        description="`fifo`: groups are trained once, in order. `signal`: groups with different rewards are also replayed"
        " in place of groups with equal ones.",
    )
    sampler: Literal["fifo", "freshest", "prioritized"] = Field(
        "prioritized",
        description="Group to replay: the first, the newest policy's, or at random by score (see docs/algorithms.md).",
    )
    remover: Literal["oldest", "lowest_score"] = Field(
        "lowest_score", description="Which group makes room when `max_size` are kept."
    )
    max_size: Positive = Field(256, description="Groups kept for replay.")
    min_size: Positive = Field(16, description="Groups kept before the first one is replayed.")
    samples_per_insert: Annotated[float, Field(gt=0, le=1e6)] = Field(
        1.0,
        description="Largest number of groups trained per group generated.",
    )
    max_times_sampled: Annotated[int, Field(ge=2)] = Field(
        4, description="Times that one group is trained, the first one included."
    )
    max_age_versions: Positive = Field(16, description="Versions after which a group is not replayed any more.")
    half_life_versions: Annotated[float, Field(ge=1e-3)] = Field(4.0, description="Age at which a score counts half.")
    max_share: Share = Field(0.5, description="Largest share of a batch that is replayed.")
    keep_all: bool = Field(
        False,
        description="Never delete a group from the journal; needed for `rl-trainer --from-journal`.",
    )
    keep_bytes: Count = Field(
        2**30,
        description="Bytes of groups that no checkpoint needs and that are kept for inspection, newest first.",
    )
    keep_age_s: PositiveSeconds = Field(
        7 * 86_400.0, description="Time for which groups that no checkpoint needs are kept for inspection."
    )
    max_disk_used: Share = Field(
        0.9,
        description="Share of run_dir's disk in use above which no leases are given.",
    )

    def problems(self) -> Problems:
        if self.min_size > self.max_size:
            yield (
                f"min_size={self.min_size} is above max_size={self.max_size}, so no group could ever be replayed: lower "
                "min_size or raise max_size"
            )


class RerollSection(Section):
    max_attempts: Annotated[int, Field(ge=0, le=1000)] = Field(
        2,
        description="Times that a prompt returns in an epoch after a group whose completions all failed. 0: never.",
    )
    reward: str | None = Field(
        None, description="Name of the reward function that judges failure. Default: the first one."
    )
    fail_threshold: float = Field(
        0.0, description="A completion failed when that reward, unweighted, is at or below this."
    )
    solved_threshold: float = Field(1.0, description="A completion solved its prompt when it is at or above this.")
    delay_versions: Positive = Field(4, description="Versions after which a failed prompt returns.")
    max_share: Annotated[float, Field(gt=0, lt=1)] = Field(0.25, description="Share of the leases that are rerolls.")
    max_pending: Positive = Field(4096, description="Prompts that wait to return; the longest waiting give way.")
    solved_cooldown_epochs: Count = Field(
        0, description="Epochs without a prompt after a group whose completions all solved it."
    )

    def problems(self) -> Problems:
        if self.fail_threshold >= self.solved_threshold:
            yield "fail_threshold must be below solved_threshold"


class AdvantageSection(Section):
    baseline: Literal["group", "leave_one_out", "none"] = Field(
        "group",
        description="Baseline of a reward: the mean of its group, or of the others in it (RLOO), or `none` (REINFORCE).",
    )
    overlong_buffer_tokens: Count = Field(
        0,
        description="Soft overlong punishment (DAPO): the penalty grows over the last N tokens before "
        "max_completion_length. 0: none.",
    )
    overlong_penalty: PositiveFloat = Field(
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
        description="Importance correction; see docs/corrections.md.",
    )
    ratio_min: Annotated[float, Field(ge=0)] | None = Field(None, description="Lower bound. Default: the preset's.")
    ratio_max: PositiveFloat | None = Field(None, description="Upper bound. Default: the preset's.")
    token_veto: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Mask a completion with a token whose ratio is below this."
    )
    probability_difference_max: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="DPPO: mask a token whose probability moved by more than this from the sampler's towards its "
        "advantage.",
    )

    def problems(self) -> Problems:
        if self.ratio_min is not None and self.ratio_max is not None and self.ratio_min >= self.ratio_max:
            yield "ratio_min must be below ratio_max"


class LossSection(Section):
    ce_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight of the cross-entropy of reference answers (`dataset.answer_column`)."
    )
    weights_column: str | None = Field(
        None,
        description="Column with a row's weights of `rewards`, `teacher` and `answer` in the loss; 1 where none is given.",
    )


class GuardsSection(Section):
    max_groups_without_signal: Positive | None = Field(
        1024,
        description="The run ends (exit 67) after N groups in a row without signal while the trainer waits. null: "
        "only the stall timeout ends it.",
    )
    max_groups_without_reward: Positive | None = Field(
        64,
        description="The run ends (exit 66) if a reward failed for all of its first N groups. null: only a warning.",
    )
