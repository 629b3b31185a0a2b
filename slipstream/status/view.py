"""The numbers of the view.

Guarantee: plain values; a number that is not known is None. The fields are the keys of `slipstream status --once --json`
(docs/monitoring.md), so that a field is renamed only with a note in CHANGELOG.md.
"""

from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from slipstream.run_reader import Ended


class TrainerView(Struct, frozen=True, kw_only=True):
    """The trainer. A field has the name that the status document gives it, or says which."""

    address: str | None = None
    daemon: str | None = None
    error: str | None = None
    not_ready: dict[str, str] = {}
    run: str | None = None
    release: str | None = None
    rates_over_s: float | None = None
    rates_since_start: bool | None = None
    step: int | None = None
    max_steps: int | None = None
    epoch: int | None = None
    policy_version: int | None = None
    gpu_turn: dict[str, int] = {}  # 1 for whose turn it is; all 0 where the GPU is nobody else's
    gpu_turn_age_s: float | None = field(name="gpu_turn_age_seconds", default=None)
    gpu_turn_s: dict[str, float] = field(name="gpu_turn_seconds", default_factory=dict)
    since_last_step_s: float | None = None
    step_pace_s: float | None = None
    eta_s: float | None = None
    wait_share: float | None = None
    waiting_now_s: float | None = field(name="waiting_seconds", default=None)
    tokens_generated_per_s: float | None = None
    tokens_trained_per_s: float | None = None
    reward: float | None = None
    reward_std: float | None = None
    rewards_by_function: dict[str, float] = field(name="reward_by_function", default_factory=dict)
    zero_signal_share: float | None = field(name="zero_signal_ratio", default=None)
    truncated_share: float | None = field(name="completions_truncated_ratio", default=None)
    completion_length_mean: float | None = field(name="completion_length_mean_tokens", default=None)
    effective_sample_share: float | None = field(name="effective_sample_ratio", default=None)
    sampling_kl: float | None = field(name="sampling_kl_nats", default=None)
    entropy: float | None = field(name="entropy_nats", default=None)
    loss: float | None = None
    gradient_norm: float | None = None
    nonfinite_steps: int | None = None
    staleness_mean: float | None = field(name="staleness_mean_versions", default=None)
    staleness_max: int | None = field(name="staleness_max_versions", default=None)
    max_staleness: int | None = field(name="max_staleness_versions", default=None)
    producers_connected: int | None = None
    leases_out: int | None = None
    groups_ready: int | None = None
    groups_replayable: int | None = None
    rerolls_waiting: int | None = None
    groups_received: dict[str, int] = {}
    leases_failed: dict[str, int] = {}
    connections_refused: dict[str, int] = {}
    groups_trained: int | None = None
    groups_went_stale: int | None = None
    groups_quarantined: int | None = None
    dead_letters: int | None = None
    frames_refused: int | None = None
    journal_bytes: int | None = None
    journal_commit_s: float | None = None
    disk_used_share: float | None = field(name="disk_used_ratio", default=None)
    disk_limit_share: float | None = field(name="disk_used_limit_ratio", default=None)
    evaluation_score: float | None = None
    evaluation_best_score: float | None = None
    evaluation_version: int | None = None
    evaluation_prompts: int | None = None
    evaluation_prompts_done: int | None = None
    evaluations: dict[str, int] = {}
    rank_step_s: dict[str, float] = field(name="rank_step_seconds", default_factory=dict)  # empty for one rank
    rank_waiting_s: dict[str, float] = field(name="rank_waiting_seconds", default_factory=dict)
    rank_tokens: dict[str, int] = {}
    rank_memory_bytes: dict[str, int] = {}

    @property
    def gpu_side(self) -> str | None:
        """Whose turn it is on the GPU that both sides share; None where they do not."""
        return next((side for side, has_it in self.gpu_turn.items() if has_it), None)


class ProducerView(Struct, frozen=True, kw_only=True):
    """One producer: what it says itself, and what the trainer says of it."""

    name: str
    address: str | None = None  # None if only the trainer knows it
    error: str | None = None
    not_ready: dict[str, str] = {}
    release: str | None = None
    rates_over_s: float | None = None
    rates_since_start: bool | None = None
    connected: bool | None = None  # as it says itself or, if it does not answer, the trainer
    policy_version: int | None = None
    lag: int | None = None  # versions by which it is behind the newest
    refused_version: int | None = None  # that it refuses to serve; -1 if there is none
    heard_s: float | None = None  # since the trainer heard from it
    leases: dict[str, int] = {}  # that it holds, by stage; only `held` if the trainer alone knows them
    paused: bool | None = None
    idle_share: float | None = None
    tokens_per_s: float | None = None
    swaps: dict[str, int] = {}
    swap_mean_s: float | None = None
    swap_last_s: float | None = None


class View(Struct, frozen=True, kw_only=True):
    at: float  # Unix time
    trainer: TrainerView | None
    producers: list[ProducerView]
    silent: dict[str, str]  # addresses of which nobody knows what they are, and why they say nothing
    rewards: dict[int, float] = {}  # mean ones of the last steps, by step
    ended: Ended | None = None  # if nobody answers, because the trainer has ended by itself

    @property
    def answers(self) -> bool:
        """Whether any daemon does."""
        daemons = (self.trainer, *self.producers)
        return any(daemon is not None and daemon.address is not None and daemon.error is None for daemon in daemons)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "answers": self.answers,
            "trainer": self.trainer and asdict(self.trainer),
            "producers": [asdict(producer) for producer in self.producers],
            "ended": self.ended and self.ended._asdict(),
            "rewards": [{"step": step, "reward": reward} for step, reward in self.rewards.items()],
        }
