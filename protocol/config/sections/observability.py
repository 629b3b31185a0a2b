"""Section `observability`: logs, metrics and health of the daemons."""

from typing import Annotated, Literal

from pydantic import Field

from protocol.config.sections.section import PositiveSeconds, Section


class ObservabilitySection(Section):
    progress: bool = Field(True, description="Progress bar on a terminal; one line per step elsewhere.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the daemons' logs.")
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="`auto`: one JSON object per line under systemd, text elsewhere."
    )
    metrics_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address at which each daemon serves `/metrics`, `/targets`, `/status`, `/healthz` and `/readyz`. They show "
        "numbers and addresses, no prompts and no keys, to everybody who can reach it.",
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
