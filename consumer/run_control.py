"""What happens at the end of every optimizer step and checkpoint, as a transformers callback.

Guarantee: when step n ends, version n / sync_interval is published before the next batch is cut, the step is reported
once, and a checkpoint that transformers wrote is committed with the pipeline state that belongs to it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import TrainerCallback

from consumer import checkpoints
from consumer.feed import BatchFeed
from consumer.intake import Intake
from consumer.progress import StepReport, batch_metrics
from consumer.publisher import adapter_blob
from protocol.adapter_blob import pack
from replay.buffer import RolloutBuffer
from replay.staleness import StalenessBudget

if TYPE_CHECKING:
    from consumer.trainer import SlipstreamTrainer


class RunControl(TrainerCallback):
    """See the module's guarantee."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        budget: StalenessBudget,
        intake: Intake,
        feed: BatchFeed,
        report: StepReport,
        *,
        sync_interval: int,
        keep_checkpoints: int | None,
        run_id: str,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._buffer = buffer
        self._budget = budget
        self._intake = intake
        self._feed = feed
        self._report = report
        self._sync_interval = sync_interval
        self._keep_checkpoints = keep_checkpoints
        self._run_id = run_id
        self._stop_requested = stop_requested
        self._began = time.monotonic()
        self.trainer: SlipstreamTrainer  # set once it exists; it takes this callback in its constructor

    def publish(self, step: int) -> None:
        """Publishes the weights that step `step` starts from."""
        blob, digest = pack(adapter_blob(self.trainer.accelerator.unwrap_model(self.trainer.model)))
        self._intake.publish(self._budget.version_at(step), blob, digest)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()
        self._seen = {name: len(values) for name, values in self.trainer._metrics["train"].items()}
        batch = self._feed.last
        assert batch is not None
        cut_by = self._budget.version_at(batch.step)  # further iterations over the batch are some versions on
        weights = self.trainer.recipe.weights.numpy()
        self._metrics = batch_metrics(batch, cut_by, weights, self.trainer.reward_func_names)
        self._metrics["policy_version"] = float(self._budget.version_at(state.global_step))
        for name, value in self._metrics.items():
            self.trainer.record_metric(name, value)
        self.trainer.record_metric("wait_s", self._feed.wait_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._sync_interval == 0:
            self.publish(state.global_step)
        batch = self._feed.last
        assert batch is not None
        recorded = {
            name: _over_micro_batches(name, values[self._seen.get(name, 0) :])
            for name, values in self.trainer._metrics["train"].items()
        }
        latest = {name: value for name, value in recorded.items() if value is not None}
        self._report.step(
            state.global_step,
            latest | self._metrics,
            wait_s=self._feed.wait_s,
            step_s=time.monotonic() - self._began,
            tokens=sum(group.num_tokens for group in batch.groups),
        )
        self._feed.wait_s = 0.0  # further iterations over the same batch do not wait
        if self._stop_requested():
            control.should_save = True
            control.should_training_stop = True

    def save_if_needed(self, first_step: int) -> None:
        """Commits a checkpoint of this moment, unless nothing was trained since the last one."""
        step = self.trainer.state.global_step
        folder = Path(self.trainer.args.output_dir) / f"checkpoint-{step}"
        if step > first_step and not checkpoints.is_committed(folder):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            self.on_save(self.trainer.args, self.trainer.state, self.trainer.control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        pipeline = self._buffer.state() | {"step": state.global_step, "run_id": self._run_id}
        checkpoints.commit(folder, pipeline)
        if self._keep_checkpoints:
            checkpoints.prune(Path(args.output_dir), self._keep_checkpoints)


def _over_micro_batches(name: str, values: list[float]) -> float | None:
    """One number for the step: the largest of what is called max, the smallest min, the mean of all else."""
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return None
    combine = {"max": max, "min": min}.get(name.rpartition("/")[2], np.mean)
    return float(combine(known))
