"""What happens at the end of every optimizer step and checkpoint, as a transformers callback.

Guarantee: when step n ends, the weights of version n / sync_interval are taken before the next step begins, the step is
reported once, and a checkpoint counts only together with the pipeline state that belongs to it. Checkpoints and stops wait
for the last iteration over a batch, checkpoints also for a step that publishes, so that a version means the same weights
afterwards.
"""

import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from consumer.checkpoints import folders as checkpoints
from consumer.evaluation.control import EvaluationControl
from consumer.publishing.probe import Probe
from consumer.publishing.snapshots import AdapterSnapshots
from consumer.reporting.sampled_rollouts import RolloutLog
from consumer.reporting.step_report import StepReport, batch_metrics
from consumer.training.pipeline import Feed, Pipeline
from consumer.waiting import Patience, write_when_there_is_room
from protocol.service import logs
from replay.prompts.staleness import StalenessBudget

if TYPE_CHECKING:
    from consumer.training.trainer import SlipstreamTrainer


_MOST_LOGS = 100  # that transformers keeps and writes into checkpoints; steps.jsonl has all of them
_EFFECTIVE_SHARE = "sampling/importance_sampling_ratio/effective_sample_share"


class RunControl(TrainerCallback):
    """See the module's guarantee."""

    def __init__(
        self,
        pipeline: Pipeline,
        budget: StalenessBudget,
        feed: Feed,
        report: StepReport,
        patience: Patience,
        *,
        keep_checkpoints: int | None,
        run_id: str,
        stop_requested: Callable[[], bool],
        evaluation: EvaluationControl | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._budget = budget
        self._feed = feed
        self._report = report
        self._patience = patience
        self._keep_checkpoints = keep_checkpoints
        self._run_id = run_id
        self._stop_requested = stop_requested
        self._evaluation = evaluation
        self._began = time.monotonic()
        self._save_due = False
        self.trainer: SlipstreamTrainer  # set once it exists; it takes this callback in its constructor
        self.rollouts: RolloutLog  # set after the trainer, whose tokenizer it needs
        self.probe: Probe  # likewise, and its model

    @property
    def seen_enough(self) -> str | None:
        """Why the run ends before its last step, if evaluations say that it should."""
        return self._evaluation.stop_reason if self._evaluation else None

    def publish(self, step: int) -> None:
        """Publishes the weights that step `step` starts from."""
        version = self._budget.version_at(step)
        self._pipeline.publish(step, version, self._snapshots.take(self.probe.measure(version)))
        logs.bind(version=version)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()
        self._seen = {name: len(values) for name, values in self.trainer._metrics["train"].items()}
        batch = self._feed.last
        assert batch is not None
        cut_by = self._budget.version_at(batch.step)  # further iterations over the batch are some versions on
        if batch.last_step - batch.num_iterations == state.global_step:
            self._report.batch([cut_by - group.policy_version for group in batch.groups[: batch.num_fresh]])
        weights = self.trainer.recipe.rewards.weights
        self._metrics = batch_metrics(batch, cut_by, weights, self.trainer.reward_func_names)
        self._metrics["policy_version"] = float(self._budget.version_at(state.global_step))
        for name, value in self._metrics.items():
            self.trainer.record_metric(name, value)
        self.trainer.record_metric("wait_s", self._feed.wait_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._budget.sync_interval == 0:
            self.publish(state.global_step)
        else:
            self._pipeline.end_step(state.global_step)
        batch = self._feed.last
        assert batch is not None
        latest = {
            name: values[-1]
            for name, values in self.trainer._metrics["train"].items()
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
        self.rollouts.note(state.global_step, batch, self._budget.version_at(batch.step))
        if self._evaluation is not None:
            self._evaluation.collect()
        self._feed.wait_s = 0.0  # further iterations over the same batch do not wait
        self._save_due |= control.should_save
        is_last = state.global_step >= state.max_steps
        batch_ended = is_last or state.global_step >= batch.last_step
        published = is_last or state.global_step % self._budget.sync_interval == 0
        stop = batch_ended and (self._stop_requested() or self.seen_enough is not None)
        control.should_save = stop or (self._save_due and batch_ended and published)
        control.should_training_stop |= stop
        self._save_due &= not control.should_save

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pipeline.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self._report.logged(logs)
        del state.log_history[:-_MOST_LOGS]

    def save_if_needed(self, first_step: int) -> None:
        """Commits a checkpoint of this moment, unless nothing was trained since the last one."""
        step = self.trainer.state.global_step
        if step > first_step and not checkpoints.is_committed(self._checkpoints_dir / f"checkpoint-{step}"):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def save(self, staged: Path, write: Callable[[], None]) -> None:
        """Makes a checkpoint of this moment count, once `write` has put transformers' part of it into `staged`. Waits
        for room on a full disk."""
        step = self.trainer.state.global_step
        state = self._pipeline.state() | {"step": step, "run_id": self._run_id}

        def whole() -> None:
            checkpoints.clear_leftovers(self._checkpoints_dir)
            try:
                write()
                checkpoints.commit(staged, state)
            except BaseException:
                checkpoints.clear_leftovers(self._checkpoints_dir)
                raise

        write_when_there_is_room(whole, self._patience, self._checkpoints_dir, "a checkpoint")
        if self._keep_checkpoints:
            checkpoints.prune(self._checkpoints_dir, self._keep_checkpoints)
        self._pipeline.checkpointed(self._checkpoints_dir)

    @cached_property
    def _snapshots(self) -> AdapterSnapshots:
        return AdapterSnapshots(self.trainer.accelerator.unwrap_model(self.trainer.model))

    @property
    def _checkpoints_dir(self) -> Path:
        return Path(self.trainer.args.output_dir)
