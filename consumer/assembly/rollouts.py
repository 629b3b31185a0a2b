"""The rollout buffer of a run, what adapts it, and its evaluations, from the configuration. Wiring only."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from consumer.evaluation.control import EvaluationControl
from consumer.evaluation.leases import EvaluationLeases, EvaluationRules
from consumer.evaluation.results import EvaluationQueue, EvaluationResults
from consumer.prompts.dataset import PromptDataset
from consumer.prompts.source import PromptSource
from consumer.publishing.policy_store import PolicyStore
from consumer.training.run_components import RunComponents
from protocol.channel.channel import ServerChannel
from protocol.config.data import WEIGHTED_SUM, EvaluationSection
from protocol.config.learning import PipelineSection
from protocol.config.run import RunConfig
from protocol.runtime.logs import Throttle
from replay.batches.cutting import BatchCutter
from replay.batches.replay_table import ReplayTable
from replay.batches.signal_watch import SignalWatch
from replay.buffer import RolloutBuffer
from replay.journal.writer import Journal
from replay.prompts.adaptive_staleness import StalenessController
from replay.prompts.evaluation_leases import Metric
from replay.prompts.failure_budgets import FailureClass, FailureWatch, RetryBudget
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
        RerollRules(reroll, config.reward_names.index(reroll.reward) if reroll.reward else 0),
        components.rewards.mean_reward,
        FailureWatch(pipeline.max_failed_share),
        SignalWatch(config.guards.max_groups_without_signal),
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


logger = logging.getLogger(__name__)


def evaluation_of(
    components: RunComponents,
    channel: ServerChannel,
    store: PolicyStore,
    read: Callable[[PromptDataset], PromptSource],
    session: str,
    first_step: int,
    say: Callable[..., None],
) -> EvaluationControl | None:
    """None for a run without evaluations.

    Args:
        read: makes of a dataset what the intake's thread may ask.
        session: unique per trainer process.
        first_step: steps taken before this process.
    """
    config, section = components.config, components.config.evaluation
    if section is None or components.held_out is None:
        return None
    pipeline, run_dir = config.pipeline, Path(config.run_dir)
    results = EvaluationResults(run_dir, config.checkpoints_dir, section, first_step, pipeline.max_failed_share)
    due = EvaluationQueue(run_dir)
    due.restore(first_step, results.versions)
    rules = EvaluationRules(
        num_prompts=min(len(components.held_out), section.max_prompts or len(components.held_out)),
        sampling=msgspec.structs.replace(
            config.sampling.message,
            num_generations=section.num_completions,
            temperature=section.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
        ),
        metric=_metric(config, section),
        shape=dataclasses.replace(components.shape, num_generations=section.num_completions),
        budgets=retry_budgets(pipeline),
        per_place=max(1, config.sampling.num_generations // section.num_completions),
        timeout_s=pipeline.lease_timeout_s,
        session=session,
    )
    return EvaluationControl(
        section,
        due,
        results,
        EvaluationLeases(store, channel, due, read(components.held_out), rules, Throttle(logger)),
        run_dir=run_dir,
        reward_names=config.reward_names,
        last_version=components.budget.version_at(components.arguments.max_steps),
        say=say,
    )


def _metric(config: RunConfig, section: EvaluationSection) -> Metric:
    weights = [
        weight if section.metric == WEIGHTED_SUM else float(name == section.metric)
        for name, weight in zip(config.reward_names, config.reward_weights, strict=True)
    ]
    return Metric(np.array(weights, np.float32), section.threshold, section.pass_k)
