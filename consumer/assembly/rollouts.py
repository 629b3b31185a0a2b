"""The rollout buffer of a run and what adapts it, from the configuration. Wiring only."""

from typing import Any

from consumer.training.run_components import RunComponents
from protocol.config.run import RunConfig
from protocol.config.sections.learning import PipelineSection
from replay.batches.cutting import BatchCutter
from replay.batches.replay_table import ReplayTable
from replay.buffer import RolloutBuffer
from replay.journal.writer import Journal
from replay.prompts.adaptive_staleness import StalenessController
from replay.prompts.failure_budgets import FailureClass, RetryBudget
from replay.prompts.ledger import PromptLedger
from replay.prompts.rerolls import RerollRules


def rollout_buffer(components: RunComponents, journal: Journal, session: str) -> RolloutBuffer:
    """An empty buffer.

    Args:
        session: unique per trainer process.
    """
    config = components.config
    pipeline, reroll = config.pipeline, config.reroll
    ledger = PromptLedger(
        len(components.prompts),
        seed=config.seed,
        shuffle=config.dataset.shuffle,
        budgets=retry_budgets(pipeline),
        session=session,
        rerolls=reroll,
    )
    cutter = BatchCutter(
        components.budget,
        journal,
        signal=components.rewards.signal,
        replay=ReplayTable(config.replay, config.seed) if config.replay.mode == "signal" else None,
        max_replayed=min(int(config.replay.max_share * pipeline.groups_per_step), pipeline.groups_per_step - 1),
        partial=pipeline.fill == "partial",
    )
    return RolloutBuffer(
        ledger,
        cutter,
        journal,
        rules=RerollRules(reroll, config.reward_names.index(reroll.reward) if reroll.reward else 0),
        mean_reward=components.rewards.mean_reward,
        max_failed_share=pipeline.max_failed_share,
        max_groups_without_signal=config.guards.max_groups_without_signal,
    )


def retry_budgets(pipeline: PipelineSection) -> dict[FailureClass, RetryBudget]:
    """How often a prompt is tried again, for training and for evaluations alike."""
    return {
        "data": RetryBudget(pipeline.max_data_attempts, pipeline.data_backoff_s),
        "infra": RetryBudget(pipeline.max_infra_attempts, pipeline.infra_backoff_s),
    }


def staleness_controller(config: RunConfig, state: dict[str, Any]) -> StalenessController | None:
    """What adapts the staleness under `max_staleness: auto`, as it was at the checkpoint with this pipeline state."""
    pipeline = config.pipeline
    if pipeline.max_staleness != "auto":
        return None
    controller = StalenessController(*pipeline.auto_staleness, pipeline.auto_min_effective_share)
    if "staleness" in state:
        controller.restore(state["staleness"])
    return controller
