"""Evaluations of a run, from the configuration. Wiring only."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from consumer.assembly.rollouts import retry_budgets
from consumer.evaluation.control import EvaluationControl
from consumer.evaluation.leases import EvaluationLeases, EvaluationRules
from consumer.evaluation.queue import EvaluationQueue
from consumer.evaluation.results import EvaluationResults
from consumer.prompts.dataset import PromptDataset
from consumer.prompts.source import PromptSource
from consumer.publishing.policy_store import PolicyStore
from consumer.training.run_components import RunComponents
from protocol.config.run import RunConfig
from protocol.config.sections.evaluation import WEIGHTED_SUM, EvaluationSection
from protocol.throttle import Throttle
from protocol.transport.channel import ServerChannel
from protocol.wire.messages import Sampling
from replay.prompts.evaluation_leases import Metric

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
        sampling=Sampling(section.num_completions, config.sampling.max_completion_length, section.temperature),
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
        EvaluationLeases(channel, store, due, read(components.held_out), rules, Throttle(logger)),
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
