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

from consumer.link.snapshots import AdapterSnapshots, Probe
from consumer.report.sampled_rollouts import RolloutLog
from consumer.report.steps import batch_metrics
from consumer.training.pipeline import Connections
from consumer.training.trainer import SlipstreamTrainer
from consumer.waiting import StopRequested, ThreadErrors
from protocol.runtime import logs
from protocol.runtime.health import Health
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
        self._snapshots = AdapterSnapshots(self.trainer.accelerator.unwrap_model(self.trainer.model))

    @property
    def early_stop_reason(self) -> str | None:
        """Why the run ends before its last step, if evaluations say that it should."""
        return self.connections.evaluation.results.stop_reason if self.connections.evaluation else None

    def publish(self, step: int) -> None:
        """Publishes the weights that step `step` starts from."""
        version = self.budget.version_at(step)
        snapshot = self._snapshots.take(self.probe.measure(version))
        self.connections.pipeline.publish(step, version, snapshot, self._last_cut())
        logs.bind(version=version)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()
        self.trainer.step_numbers.clear()
        batch = self.connections.feed.last
        assert batch is not None
        cut_by = self.budget.version_at(batch.step)  # further iterations over the batch are some versions on
        if batch.last_step - batch.num_iterations == state.global_step:
            self.connections.report.batch([cut_by - group.policy_version for group in batch.groups[: batch.num_fresh]])
        weights = self.trainer.recipe.rewards.weights
        self._metrics = batch_metrics(batch, cut_by, weights, self.trainer.reward_func_names)
        self._metrics["policy_version"] = float(self.budget.version_at(state.global_step))
        for name, value in self._metrics.items():
            self.trainer.record_metric(name, value)
        self.trainer.record_metric("wait_s", self.connections.feed.wait_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.budget.sync_interval == 0:
            self.publish(state.global_step)
        else:
            self.connections.pipeline.end_step(state.global_step, self._last_cut())
        batch = self.connections.feed.last
        assert batch is not None
        latest = {name: value for name, value in self.trainer.step_numbers.items() if not math.isnan(value)}
        wait_s, step_s = self.connections.feed.wait_s, time.monotonic() - self._began
        standing = self.connections.pipeline.observe()
        self.connections.report.step(
            state.global_step,
            latest | self.trainer.last_step | self._metrics | standing,
            wait_s=wait_s,
            step_s=step_s,
            tokens=sum(int(group.sampled_lengths.sum()) for group in batch.groups),
        )
        self.rollouts.note(state.global_step, batch, self.budget.version_at(batch.step))
        if self.connections.evaluation is not None:
            self.connections.evaluation.collect(self.trainer.log_now)
        self.connections.feed.wait_s = 0.0  # further iterations over the same batch do not wait
        self._save_due |= control.should_save
        is_last = state.global_step >= state.max_steps
        batch_ended = is_last or state.global_step >= batch.last_step
        published = is_last or state.global_step % self.budget.sync_interval == 0
        stop = batch_ended and (self.stop_requested() or self.early_stop_reason is not None)
        control.should_save = stop or (self._save_due and batch_ended and published)
        control.should_training_stop |= stop
        self._save_due &= not control.should_save

    def _last_cut(self) -> StepCut | None:
        """How the last step was cut, with its advantages; None before the first."""
        cut, batch = self.trainer.last_cut, self.connections.feed.last
        if cut is None or batch is None:
            return None
        advantages = self.trainer.recipe.advantages_of(batch.groups)
        return cut._replace(advantages=advantages.numpy().astype("<f4").tobytes())

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
