"""What happens at the end of every optimizer step, as a transformers callback.

Guarantee: when step n ends, the weights of version n / sync_interval are taken before the next step begins, and the step is
reported once. Checkpoints and stops wait for the last iteration over a batch, checkpoints also for a step that publishes, so
that a version means the same weights afterwards.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from consumer.publishing.probe import Probe
from consumer.publishing.snapshots import AdapterSnapshots
from consumer.reporting.sampled_rollouts import RolloutLog
from consumer.reporting.step_report import batch_metrics
from consumer.training.pipeline import Connections
from consumer.training.trainer import SlipstreamTrainer
from protocol.service import logs
from replay.prompts.staleness import StalenessBudget

_MOST_LOGS = 100  # that transformers keeps and writes into checkpoints; steps.jsonl has all of them
_EFFECTIVE_SHARE = "sampling/importance_sampling_ratio/effective_sample_share"


class RunControl(TrainerCallback):
    """See the module's guarantee."""

    def __init__(
        self,
        trainer: SlipstreamTrainer,
        connections: Connections,
        budget: StalenessBudget,
        probe: Probe,
        rollouts: RolloutLog,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._feed = connections.feed
        self._pipeline = connections.pipeline
        self._report = connections.report
        self._evaluation = connections.evaluation
        self._budget = budget
        self._probe = probe
        self._rollouts = rollouts
        self._stop_requested = stop_requested
        self._snapshots = AdapterSnapshots(trainer.accelerator.unwrap_model(trainer.model))
        self._began = time.monotonic()
        self._save_due = False

    @property
    def early_stop_reason(self) -> str | None:
        """Why the run ends before its last step, if evaluations say that it should."""
        return self._evaluation.stop_reason if self._evaluation else None

    def publish(self, step: int) -> None:
        """Publishes the weights that step `step` starts from."""
        version = self._budget.version_at(step)
        self._pipeline.publish(step, version, self._snapshots.take(self._probe.measure(version)))
        logs.bind(version=version)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()
        self._seen = {name: len(values) for name, values in self._trainer._metrics["train"].items()}
        batch = self._feed.last
        assert batch is not None
        cut_by = self._budget.version_at(batch.step)  # further iterations over the batch are some versions on
        if batch.last_step - batch.num_iterations == state.global_step:
            self._report.batch([cut_by - group.policy_version for group in batch.groups[: batch.num_fresh]])
        weights = self._trainer.recipe.rewards.weights
        self._metrics = batch_metrics(batch, cut_by, weights, self._trainer.reward_func_names)
        self._metrics["policy_version"] = float(self._budget.version_at(state.global_step))
        for name, value in self._metrics.items():
            self._trainer.record_metric(name, value)
        self._trainer.record_metric("wait_s", self._feed.wait_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._budget.sync_interval == 0:
            self.publish(state.global_step)
        else:
            self._pipeline.end_step(state.global_step)
        batch = self._feed.last
        assert batch is not None
        latest = {
            name: values[-1]
            for name, values in self._trainer._metrics["train"].items()
            if len(values) > self._seen.get(name, 0) and not math.isnan(values[-1])
        }
        wait_s, step_s = self._feed.wait_s, time.monotonic() - self._began
        standing = self._pipeline.observe(latest.get(_EFFECTIVE_SHARE), wait_s / max(1e-9, wait_s + step_s))
        self._report.step(
            state.global_step,
            latest | self._metrics | standing,
            wait_s=wait_s,
            step_s=step_s,
            tokens=sum(int(group.sampled_lengths.sum()) for group in batch.groups),
        )
        self._rollouts.note(state.global_step, batch, self._budget.version_at(batch.step))
        if self._evaluation is not None:
            self._evaluation.collect(self._trainer.log_now)
        self._feed.wait_s = 0.0  # further iterations over the same batch do not wait
        self._save_due |= control.should_save
        is_last = state.global_step >= state.max_steps
        batch_ended = is_last or state.global_step >= batch.last_step
        published = is_last or state.global_step % self._budget.sync_interval == 0
        stop = batch_ended and (self._stop_requested() or self.early_stop_reason is not None)
        control.should_save = stop or (self._save_due and batch_ended and published)
        control.should_training_stop |= stop
        self._save_due &= not control.should_save

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pipeline.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self._report.logged(logs)
        del state.log_history[:-_MOST_LOGS]
