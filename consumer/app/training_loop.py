"""The trainer between its feed and its pipeline: from the first step to the final adapter.

Guarantee: when step n ends, the weights of version n / sync_interval are taken before the next step begins, and the step is
reported once. Checkpoints and stops wait for the last iteration over a batch, checkpoints also for a step that publishes, so
that a version means the same weights afterwards. There is a sign of life for each micro-batch.

Training ends with every step taken, or with a checkpoint of the last one that was, unless the disk has no room for it. After the
last step the final adapter is on the disk before anything else happens, and where an evaluation of it follows, so is a
checkpoint: a run that is stopped or killed meanwhile goes on with the evaluation and takes no step again.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from consumer.app.pipeline import Connections
from consumer.app.run_components import RunStart
from consumer.learn.checkpoints import is_committed
from consumer.learn.loss import NotFiniteStep
from consumer.learn.memory import is_out_of_memory
from consumer.learn.micro_batches import CompletionTooLargeError
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.snapshots import AdapterSnapshots, Probe
from consumer.report.inspection import keep, not_finite
from consumer.report.sampled_rollouts import RolloutLog
from consumer.report.steps import StepRecord, batch_metrics
from consumer.waiting import StopRequested, ThreadErrors, write_when_there_is_room
from protocol.errors import DeviceError, NotFiniteError
from protocol.runtime import logs
from protocol.runtime.files import staged
from protocol.runtime.health import Health
from protocol.runtime.json_lines import encode_page
from replay.batch_selection import TrainingBatch
from replay.journal.schema import MicroBatchPlan
from replay.staleness import StalenessBudget

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
    def _batch(self) -> TrainingBatch:
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

    def _plan(self) -> MicroBatchPlan:
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


@dataclass(eq=False)
class TrainingLoop:
    """The trainer between its feed and its pipeline, from the first step to the final adapter."""

    trainer: SlipstreamTrainer
    control: RunControl
    connections: Connections
    start: RunStart
    run_dir: Path

    def train(self, describe: Callable[[], str] = lambda: "") -> bool:
        """Returns whether the run is finished: every step was taken and the last version evaluated, as far as it could be, or
        evaluations said that it is enough.

        Args:
            describe: says who waits for whom.
        """
        self._started = time.monotonic()
        was_stopped = False
        try:
            self._take_steps()
        except NotFiniteStep as found:
            raise NotFiniteError(self._explain(found)) from found
        except DeviceError as error:
            if not isinstance(error, CompletionTooLargeError):
                self._undo_try()
            raise
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._undo_try()
            raise DeviceError(  # no smaller pass would help, or ranks that share the base cannot give one up
                f"the trainer's device is out of memory: {error}. Lower pipeline.trainer_tokens_per_micro_batch, free the device "
                "of other processes, or take one with more memory; then go on with --resume"
            ) from error
        except StopRequested:
            was_stopped = True
        self._leave_device()
        if not self._keep() or not self._has_trained:
            return False
        if self.connections.evaluation is None or not self._took_all_steps:
            return True
        try:
            if not was_stopped:  # otherwise perhaps before the last version was published, and known to be due
                self.connections.evaluation.wait_for_last(self.connections.waits, describe, self.trainer.log_now)
                return True
        except StopRequested:
            pass
        self.connections.report.say("stopped before the last evaluation was done; the final adapter is written")
        return False

    def _undo_try(self) -> None:
        """The device ended the step in progress, and not its batch."""
        batch = self.connections.feed.last
        if batch is not None:
            self.connections.pipeline.undo_try(batch.last_step)

    @property
    def _took_all_steps(self) -> bool:
        return bool(self.trainer.state.global_step >= self.trainer.args.max_steps)

    @property
    def _has_trained(self) -> bool:
        """Whether there is no step left to take."""
        return self._took_all_steps or self.control.early_stop_reason is not None

    def _take_steps(self) -> None:
        if self.start.step < self.trainer.args.max_steps and self.control.early_stop_reason is None:
            checkpoint = self.start.checkpoint
            if self.connections.shared is not None:
                self.connections.shared.await_turn()
            self.trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
        else:  # transformers would wait for one batch more
            self.trainer.state.global_step = self.start.step

    def _leave_device(self) -> None:
        """The rest needs none."""
        if self.connections.shared is not None:
            with contextlib.suppress(
                StopRequested
            ):  # while the last policy was published, and it has left all the same
                self.connections.shared.leave()

    def _keep(self) -> bool:
        """Brings what was trained to the disk: a checkpoint if the run may have to go on from here, and the final adapter.
        False: there was no room until a stop was requested."""
        what, then = "a checkpoint", "the steps since the last one will be taken again"
        try:
            if self.connections.evaluation is not None or not self._has_trained:
                self._save_checkpoint()
            if self._has_trained:
                what, then = "the adapter", "go on with --resume to have it written"
                self._write(self.run_dir / "adapter", self.trainer.save_model, what)
        except StopRequested:
            self.connections.report.say(f"no room for {what}: {then}")
            return False
        return True

    def _save_checkpoint(self) -> None:
        """Unless nothing was trained since the last one."""
        step, folder = self.trainer.state.global_step, Path(self.trainer.args.output_dir)
        if step > self.start.step and not is_committed(folder / f"checkpoint-{step}"):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def _explain(self, found: NotFiniteStep) -> str:
        """Keeps the batch, and says what was found and how to go on."""
        trainer = self.trainer
        step, batch = trainer.state.global_step + 1, self.connections.feed.last
        assert batch is not None
        weights = not_finite(trainer.model.named_parameters(), lambda parameter: parameter)
        numbers = {
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
            "weights_not_finite": weights,
            "gradients_not_finite": not_finite(trainer.model.named_parameters(), lambda parameter: parameter.grad),
        }
        folder = keep(self.run_dir, step, batch, numbers)
        if weights:
            cause = (
                f"the weights themselves are not finite ({weights[0]} first), so an earlier step spoiled them: lower "
                "trainer.learning_rate and start from an earlier checkpoint (delete the newer ones in checkpoints/)"
            )
        else:
            cause = (
                "the weights are finite. --resume trains this batch once more, so lower trainer.learning_rate or "
                "trainer.max_grad_norm first; if that fails too, the --resume after it leaves these groups out (quarantine)"
            )
        return (
            f"step {step} was not taken: {found}. Weights and optimizer are as before it; the batch is in {folder} "
            f"(step.json, groups.safetensors; `slipstream journal show` decodes a group). {cause}"
        )

    def write_results(self, finished: bool, numbers: dict[str, Any]) -> None:
        """A summary for programs and one for people."""
        step = self.trainer.state.global_step
        summary = {"finished": finished, "steps": step, "wall_s": time.monotonic() - self._started} | numbers
        if self.connections.evaluation is not None:
            keeps_best = self.connections.evaluation.section.keep_best
            best = self.connections.evaluation.results.best if keeps_best else None
            summary |= {
                "stopped_early": self.control.early_stop_reason,
                "best": best and {**best, "folder": "checkpoints/best"},
            }

        def write(file: str) -> None:
            Path(file).write_text(encode_page(summary), encoding="utf-8")

        try:
            self._write(self.run_dir / "trainer.json", write, "trainer.json")
        except StopRequested:
            self.connections.report.say("no room for trainer.json; go on with --resume to have it written")
        hint = "" if finished else "; go on with --resume"
        outcome = "finished" if finished else "stopped"
        if finished and (reason := self.control.early_stop_reason) is not None:
            outcome += f" early, because {reason},"
        self.connections.report.say(f"rl-trainer: {outcome} at step {step} of {self.trainer.args.max_steps}{hint}")

    def _write(self, final: Path, write: Callable[[str], object], what: str) -> None:
        """Has `write` make a file or folder that appears whole, as soon as there is room for it."""

        def attempt() -> None:
            with staged(final) as partial:
                write(str(partial))

        write_when_there_is_room(attempt, self.connections.waits, final.parent, what)
