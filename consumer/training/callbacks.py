"""What happens at the end of every optimizer step, and the main thread's signs of life, as transformers callbacks.

Guarantee: when step n ends, the weights of version n / sync_interval are taken before the next step begins, and the step is
reported once. Checkpoints and stops wait for the last iteration over a batch, checkpoints also for a step that publishes, so
that a version means the same weights afterwards. There is a sign of life for each micro-batch.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.snapshots import AdapterSnapshots, Probe
from consumer.report.sampled_rollouts import RolloutLog
from consumer.report.steps import StepRecord, batch_metrics
from consumer.training.pipeline import Connections
from consumer.waiting import StopRequested, ThreadErrors
from protocol.runtime import logs
from protocol.runtime.health import Health
from replay.batches.cutting import CutBatch
from replay.journal.tables import StepCut
from replay.prompts.staleness import StalenessBudget

_MOST_LOGS = 100  # that transformers keeps and writes into checkpoints; steps.jsonl has all of them


@dataclass(eq=False)
class RunControl(TrainerCallback):
    """See the module's guarantee."""

    trainer: SlipstreamTrainer
    connections: Connections
    budget: StalenessBudget
    probe: Probe
    rollouts: RolloutLog
    stop_requested: Callable[[], bool]
    _began: float = 0.0
    _save_due: bool = False

    def __post_init__(self) -> None:
        self._snapshots = AdapterSnapshots(self.trainer.model)

    @property
    def early_stop_reason(self) -> str | None:
        """Why the run ends before its last step, if evaluations say that it should."""
        return self.connections.evaluation.results.stop_reason if self.connections.evaluation else None

    def publish(self, step: int) -> None:
        """Publishes the weights that step `step` starts from."""
        version = self.budget.version_at(step)
        snapshot = self._snapshots.take(self.probe.measure(version))
        self.connections.pipeline.publish(step, version, snapshot)
        logs.bind(version=version)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()
        batch = self._batch
        if batch.last_step - batch.num_iterations == state.global_step:
            cut_by = self.budget.version_at(batch.step)
            self.connections.report.batch([cut_by - group.policy_version for group in batch.groups[: batch.num_fresh]])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, batch = state.global_step, self._batch
        self.connections.pipeline.end_step(step, self._plan())
        published = step % self.budget.sync_interval == 0
        if published:
            self.publish(step)
        self._report(step)
        self.rollouts.note(step, batch, self.budget.version_at(batch.step))
        if self.connections.evaluation is not None:
            self.connections.evaluation.collect(self.trainer.log_now)
        self.connections.feed.wait_s = 0.0  # further iterations over the same batch do not wait
        self._save_due |= control.should_save
        is_last = step >= state.max_steps
        batch_ended = is_last or step >= batch.last_step
        stop = batch_ended and (self.stop_requested() or self.early_stop_reason is not None)
        control.should_save = stop or (self._save_due and batch_ended and (is_last or published))
        control.should_training_stop |= stop
        self._save_due &= not control.should_save

    @property
    def _batch(self) -> CutBatch:
        """The batch that is trained."""
        batch = self.connections.feed.last
        assert batch is not None
        return batch

    def _report(self, step: int) -> None:
        """Make one record of the step, for the report and for trackers."""
        batch, trained, feed = self._batch, self.trainer.last, self.connections.feed
        assert trained is not None
        cut_by = self.budget.version_at(batch.step)  # further iterations over the batch are some versions on
        weights, names = self.trainer.recipe.rewards.weights, self.trainer.reward_names
        of_batch = batch_metrics(batch, cut_by, weights, names)
        of_batch["policy_version"] = float(self.budget.version_at(step - 1))
        self.trainer.add_to_log(of_batch | {"wait_s": feed.wait_s})
        wait_s, step_s = feed.wait_s, time.monotonic() - self._began
        standing = self.connections.pipeline.observe()
        numbers = {name: value for name, value in trained.metrics.items() if not math.isnan(value)}
        numbers |= {"loss": trained.loss, "grad_norm": trained.grad_norm} | of_batch | standing
        num_tokens = sum(int(group.sampled_lengths.sum()) for group in batch.groups)
        self.connections.report.step(StepRecord(step, numbers, wait_s, step_s, num_tokens))

    def _plan(self) -> StepCut:
        """Return how the last step was split into passes, with its advantages."""
        trained = self.trainer.last
        assert trained is not None
        advantages = self.trainer.recipe.advantages_of(self._batch.groups)
        return trained.plan._replace(advantages=advantages.numpy().astype("<f4").tobytes())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.connections.pipeline.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.connections.report.logged(logs)
        del state.log_history[:-_MOST_LOGS]


@dataclass(eq=False)
class Heartbeat(TrainerCallback):
    """Tells `health` that the main thread came round. Asked to stop, it says so at once, because the step in progress may take
    long."""

    health: Health
    stop_requested: Callable[[], bool]
    errors: ThreadErrors

    def check(self) -> None:
        """For waits: also raises when waiting makes no sense any more, `StopRequested` or what ended another thread."""
        self._beat()
        if self.stop_requested():
            raise StopRequested
        self.errors.check()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._beat()

    on_substep_end = on_step_end = on_save = on_step_begin

    def _beat(self) -> None:
        if self.stop_requested():
            self.health.stopping("the step in progress ends, then a checkpoint is written")
        self.health.beat("training")
