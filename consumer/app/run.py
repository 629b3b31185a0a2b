"""A run of the trainer, from its first step to its final adapter.

Guarantee: when step n ends, the weights of version n / sync_interval are taken before the next step begins, and the step is
reported once. Checkpoints and stops wait for the last iteration over a batch, checkpoints also for a step that publishes, so
that a version means the same weights afterwards. A checkpoint is committed only together with the run's state that belongs to
it, as soon as the disk has room for both; older ones go after that.

A run ends with every step taken, or with a checkpoint of the last one that was, unless the disk has no room for it. After the
last step the final adapter or model is on the disk before anything else happens, and where an evaluation of it follows, so is a
checkpoint: a run that is stopped or killed meanwhile goes on with the evaluation and takes no step again.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from consumer.app.setup import RunStart, Setup
from consumer.evaluate.control import EvaluationControl
from consumer.learn import checkpoints
from consumer.learn.checkpoints import is_committed
from consumer.learn.loss import NotFiniteStep
from consumer.learn.memory import is_out_of_memory
from consumer.learn.micro_batches import CompletionTooLargeError, Recorded
from consumer.learn.model import loading, unquantized_probe
from consumer.learn.shards import without_weights
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.merging import save_beginning
from consumer.link.policy_store import Snapshot
from consumer.link.probe import PolicyProbe, longest_of, probe_rows
from consumer.link.snapshots import AdapterSnapshots
from consumer.link.weight_snapshots import WeightSnapshots
from consumer.ranks.exchange import ALONE, Ranks, begin
from consumer.report.inspection import keep, not_finite
from consumer.report.sampled_rollouts import RolloutLog
from consumer.report.steps import StepRecord, StepReport, batch_metrics
from consumer.report.trackers import TrackerRuns
from consumer.waiting import StopRequested, ThreadErrors, WaitPolicy, write_when_there_is_room
from protocol.errors import DeviceError, NotFiniteError, PolicyRefusedError
from protocol.runtime import logs
from protocol.runtime.files import staged
from protocol.runtime.health import Health
from protocol.runtime.json_lines import encode_page
from protocol.runtime.scratch import scratch_folder
from replay.batch_selection import TrainingBatch
from replay.journal.schema import MicroBatchPlan

_MOST_LOGS = 100  # that transformers keeps and writes into checkpoints; steps.jsonl has all of them


class Feed(Protocol):
    """The source of batches."""

    wait_s: float  # spent on the last batch
    last: TrainingBatch | None

    def __iter__(self) -> Iterator[TrainingBatch]: ...


@dataclass(eq=False)
class Liveness(TrainerCallback):
    """The main thread's signs of life, one for each micro-batch. After a stop request it reports the stop at once, because the
    step in progress may take long."""

    health: Health
    stop_requested: Callable[[], bool]
    errors: ThreadErrors

    def check(self) -> None:
        """Beat, and raise `StopRequested` or the error that ended another thread."""
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
class Run(TrainerCallback):
    """A run of the trainer. This class trains again what a journal recorded, where no policy is published; `LiveRun` trains with
    producers. Call `load` first.

    Args:
        recorded: how steps were split before.
        evaluation: None: nothing is evaluated in this run.
    """

    setup: Setup
    start: RunStart
    feed: Feed
    waits: WaitPolicy
    report: StepReport
    recorded: Recorded = field(default=lambda step: None, kw_only=True)
    evaluation: EvaluationControl | None = field(default=None, kw_only=True)
    _step_began: float = field(default=0.0, init=False)
    _save_due: bool = field(default=False, init=False)

    def load(self, ranks: Ranks = ALONE, *callbacks: TrainerCallback) -> None:
        """Build the trainer, with the weights that the run starts from.

        Args:
            ranks: take the steps together.
            callbacks: called after those of the run.

        Raises:
            ConfigError: transformers, TRL or PEFT refused, or adapter or checkpoint do not fit.
            DeviceError: the device has no memory for the model, or failed.
        """
        setup, checkpoint = self.setup, self.start.checkpoint
        if ranks.world > 1:
            self._begin(ranks)
        batches: Iterable[TrainingBatch] = self.feed
        for of_rows in (setup.answers, setup.weights):
            if of_rows is not None:
                batches = map(of_rows.add_to, batches)
        trackers = TrackerRuns(Path(setup.config.run_dir), self.start.run_id, setup.arguments.report_to)
        trackers.set_variables()
        with loading(f"model.path ({setup.model_folder}), lora and trainer do not go together"):
            trainer = SlipstreamTrainer(
                setup.config, setup.arguments, setup.lora, setup.model_folder, batches, self.commit_checkpoint, ranks,
                self.recorded,
            )  # fmt: skip
        if setup.initial_adapter is not None:
            trainer.start_from(setup.initial_adapter, resumed=checkpoint is not None)
        if checkpoint is not None and setup.config.changes_base:
            trainer.begin_from(checkpoint.folder)
        self.attach(trainer, self._probe_of(trainer))
        if checkpoint is not None:
            with loading(f"run_dir: {checkpoint.folder} does not fit model.path and lora"):
                trainer._load_from_checkpoint(str(checkpoint.folder))  # before the first policy is published
        for callback in (trackers, *callbacks):
            trainer.add_callback(callback)

    def _begin(self, ranks: Ranks) -> None:
        """Tell the other ranks of the run. Of weights that are shared they get their parts when rank 0 loads them."""
        setup, checkpoint = self.setup, self.start.checkpoint
        with scratch_folder() as scratch:
            folder = checkpoint and (
                without_weights(checkpoint.folder, scratch) if setup.config.spreads_weights else checkpoint.folder
            )
            trains = self.start.step < setup.arguments.max_steps and self.early_stop_reason is None
            begin(ranks, len(setup.prompts), setup.shape.vocab_size, self.start.step, folder, trains=trains)

    def attach(self, trainer: SlipstreamTrainer, probe: PolicyProbe) -> None:
        """Run with this trainer. Weights that train themselves, or with a part of which an adapter begins, are as they were
        loaded."""
        config = self.setup.config
        self.trainer, self._probe = trainer, probe
        self._snapshots: AdapterSnapshots | WeightSnapshots
        if config.weights == "full":
            self._snapshots = WeightSnapshots(trainer.model)
            if self.start.checkpoint is not None:
                self._snapshots.restore(self.start.checkpoint.folder)
            if config.lora is None or config.changes_base:
                probe.measure_base()
        else:
            self._snapshots = AdapterSnapshots(trainer.model)
        self._rollouts = RolloutLog(config, trainer.recipe, trainer.processing_class.decode, self.start.step)
        self._run_dir = Path(config.run_dir)
        trainer.add_callback(self)

    def _probe_of(self, trainer: SlipstreamTrainer) -> PolicyProbe:
        config, every, model = self.setup.config, self.setup.config.probe_every, trainer.model
        longest, size = longest_of(model), self.setup.shape.vocab_size
        rows = probe_rows(self.setup.prompts, trainer.processing_class, config.seed, longest, size)
        if config.model.quantization is None:
            return PolicyProbe(rows, every, model, trainer.accelerator.autocast, merged=config.is_merged_in_16_bits)
        return unquantized_probe(rows, every, config, self.setup.model_folder, self.setup.lora, model)

    # Where the results of steps go: nowhere, in a run that is trained again.

    def describe(self) -> str:
        """Return which producers the run waits for, in words."""
        return ""

    def submit(self, step: int, version: int, snapshot: Snapshot) -> None:
        """Publish the policy that step `step` has made. The snapshot is released, then or later."""
        snapshot.release()

    def flush(self) -> None:
        """Return when every policy is published."""

    def end_step(self, step: int, plan: MicroBatchPlan) -> None:
        """Record that step `step` ended, and how it was split into passes."""

    def undo_try(self) -> None:
        """Do not count this try of the batch in progress: the batch was not why the trainer stops. Any thread may call it, and
        repeat it."""

    def observe(self) -> dict[str, float]:
        """Return how many groups and prompts are where after a step, by metric."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the run's part of a checkpoint of this moment, as plain data."""
        return {}

    def checkpointed(self) -> None:
        """Call after a checkpoint was committed and old ones were deleted."""

    def await_device(self) -> None:
        """Return when the device is the trainer's."""

    def leave_device(self) -> None:
        """Leave the device to others after the last step."""

    # The end of a step.

    @property
    def early_stop_reason(self) -> str | None:
        """Return why evaluations end the run before its last step; None if they do not."""
        return self.evaluation.results.stop_reason if self.evaluation else None

    def publish(self, step: int) -> None:
        """Publish the weights that step `step` starts from."""
        version = self.setup.budget.version_at(step)
        self.submit(step, version, self._snapshot(version))
        logs.bind(version=version)

    def _snapshot(self, version: int) -> Snapshot:
        return self._snapshots.take(self._probe.measure(version))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step_began = time.monotonic()
        batch = self._batch
        if batch.last_step - batch.num_iterations == state.global_step:
            cut_by = self.setup.budget.version_at(batch.first_step - 1)
            self.report.batch([cut_by - group.policy_version for group in batch.groups[: batch.num_fresh]])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, batch = state.global_step, self._batch
        published = step % self.setup.budget.sync_interval == 0
        try:
            self.end_step(step, self._plan())
        except StopRequested:
            if published:  # ranks that share weights are in this already
                self._snapshot(self.setup.budget.version_at(step)).release()
            raise
        if published:
            self.publish(step)
        self._report(step)
        self._rollouts.note(step, batch, self.trainer.advantages, self.setup.budget.version_at(batch.first_step - 1))
        if self.evaluation is not None:
            self.evaluation.collect(self.trainer.log_now)
        self.feed.wait_s = 0.0  # further iterations over the same batch do not wait
        self._save_due |= control.should_save
        is_last = step >= state.max_steps
        batch_ended = is_last or step >= batch.last_step
        stop = batch_ended and (self.setup.stop() or self.early_stop_reason is not None)
        control.should_save = stop or (self._save_due and batch_ended and (is_last or published))
        control.should_training_stop |= stop
        self._save_due &= not control.should_save

    @property
    def _batch(self) -> TrainingBatch:
        """The batch that is trained."""
        batch = self.feed.last
        assert batch is not None
        return batch

    def _report(self, step: int) -> None:
        """Make one record of the step, for the report and for trackers."""
        batch, trained, feed = self._batch, self.trainer.last, self.feed
        assert trained is not None
        # Further iterations over the batch are some versions on.
        cut_by = self.setup.budget.version_at(batch.first_step - 1)
        names, sources = self.trainer.reward_names, self.setup.prompts.sources
        of_batch = batch_metrics(batch, cut_by, self.trainer.recipe.rewards, names, sources)
        of_batch["policy_version"] = float(self.setup.budget.version_at(step - 1))
        self.trainer.add_to_log(of_batch | {"wait_s": feed.wait_s})
        wait_s, step_s = feed.wait_s, time.monotonic() - self._step_began
        standing = self.observe()
        numbers = {name: value for name, value in trained.metrics.items() if not math.isnan(value)}
        numbers |= {"loss": trained.loss, "grad_norm": trained.grad_norm} | of_batch | standing
        num_tokens = sum(int(group.sampled_lengths.sum()) for group in batch.groups)
        self.report.step(StepRecord(step, numbers, wait_s, step_s, num_tokens))

    def _plan(self) -> MicroBatchPlan:
        """Return how the last step was split into passes, with its advantages."""
        trained = self.trainer.last
        assert trained is not None
        return trained.plan._replace(advantages=self.trainer.advantages.astype("<f4").tobytes())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.report.logged(logs)
        del state.log_history[:-_MOST_LOGS]

    # The whole run.

    def train(self) -> bool:
        """Take the steps that are left. Return whether the run is finished: every step was taken and the last version evaluated,
        as far as it could be, or evaluations ended it early."""
        self._started = time.monotonic()
        was_stopped = False
        try:
            self._take_steps()
        except NotFiniteStep as found:
            raise NotFiniteError(self._explain(found)) from found
        except PolicyRefusedError:
            self._keep()
            raise
        except DeviceError as error:
            if not isinstance(error, CompletionTooLargeError):
                self.undo_try()
            raise
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.undo_try()
            raise DeviceError(  # no smaller pass would help, or ranks that share the base cannot give one up
                f"the trainer's device is out of memory: {error}. Lower pipeline.trainer_tokens_per_micro_batch, free the device "
                "of other processes, or take one with more memory; then go on with --resume"
            ) from error
        except StopRequested:
            was_stopped = True
        with contextlib.suppress(StopRequested):  # while the last policy was published, and it has left all the same
            self.leave_device()
        if not self._keep() or not self._has_trained:
            return False
        if self.evaluation is None or not self._took_all_steps:
            return True
        try:
            if not was_stopped:  # otherwise perhaps before the last version was published, and known to be due
                self.evaluation.wait_for_last(self.waits, self.describe, self.trainer.log_now)
                return True
        except StopRequested:
            pass
        self.report.say("stopped before the last evaluation was done; the final adapter is written")
        return False

    def _write_adapter(self, folder: str) -> None:
        self.trainer.save_model(folder)
        save_beginning(self.trainer.model, Path(folder))

    @property
    def _took_all_steps(self) -> bool:
        return bool(self.trainer.state.global_step >= self.trainer.args.max_steps)

    @property
    def _has_trained(self) -> bool:
        """True if there is no step left to take."""
        return self._took_all_steps or self.early_stop_reason is not None

    def _take_steps(self) -> None:
        if self.start.step < self.trainer.args.max_steps and self.early_stop_reason is None:
            checkpoint = self.start.checkpoint
            self.await_device()
            self.trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
        else:  # transformers would wait for one batch more
            self.trainer.state.global_step = self.start.step

    def _keep(self) -> bool:
        """Write the trained weights: a checkpoint if the run may have to continue from here, and the final adapter.
        False: there was no room until a stop was requested."""
        what, then = "a checkpoint", "the steps since the last one will be taken again"
        try:
            if self.evaluation is not None or not self._has_trained:
                self._save_checkpoint()
            if self._has_trained:
                trainer, name, then = self.trainer, "adapter", "go on with --resume to have it written"
                write: Callable[[str], object] = self._write_adapter
                if self.setup.config.lora is None:
                    name, write = "model", trainer.save_weights
                what = f"the {name}"
                self._write(self._run_dir / name, write, what)
        except StopRequested:
            self.report.say(f"no room for {what}: {then}")
            return False
        return True

    def _save_checkpoint(self) -> None:
        """Save a checkpoint, unless nothing was trained since the last one."""
        step, folder = self.trainer.state.global_step, Path(self.trainer.args.output_dir)
        if step > self.start.step and not is_committed(folder / f"checkpoint-{step}"):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def _explain(self, found: NotFiniteStep) -> str:
        """Keep the batch, and return what was found and how to continue."""
        trainer = self.trainer
        step, batch = trainer.state.global_step + 1, self.feed.last
        assert batch is not None
        weights = not_finite(trainer.model.named_parameters(), lambda parameter: parameter)
        numbers = {
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
            "weights_not_finite": weights,
            "gradients_not_finite": not_finite(trainer.model.named_parameters(), lambda parameter: parameter.grad),
        }
        folder = keep(self._run_dir, step, batch, numbers)
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

    # Checkpoints and results.

    def commit_checkpoint(self, step: int, partial: Path, write: Callable[[], None]) -> None:
        """Commit a checkpoint of this moment, after optimizer step `step`.

        Args:
            write: puts the part that transformers writes into `partial`.
        """
        folder, limit = self.setup.config.checkpoints_dir, self.setup.checkpoint_limit
        state = self.state() | {"step": step, "run_id": self.start.run_id, "settings": self.setup.settings}

        def whole() -> None:
            checkpoints.clear_leftovers(folder)
            try:
                write()
                if self.setup.config.changes_base:
                    save_beginning(self.trainer.model, partial)
                if isinstance(self._snapshots, WeightSnapshots):
                    self._snapshots.save(partial)
                checkpoints.commit(partial, state)
            except BaseException:
                checkpoints.clear_leftovers(folder)
                raise

        write_when_there_is_room(whole, self.waits, folder, "a checkpoint")
        if limit:
            checkpoints.prune(folder, limit, self.setup.config.checkpoints.keep_adapters)
        self.checkpointed()

    def write_results(self, finished: bool, numbers: dict[str, Any]) -> None:
        """A summary for programs and one for people."""
        step = self.trainer.state.global_step
        summary = {"finished": finished, "steps": step, "wall_s": time.monotonic() - self._started} | numbers
        if self.evaluation is not None:
            keeps_best = self.evaluation.section.keep_best
            best = self.evaluation.results.best if keeps_best else None
            summary |= {
                "stopped_early": self.early_stop_reason,
                "best": best and {**best, "folder": "checkpoints/best"},
            }

        def write(file: str) -> None:
            Path(file).write_text(encode_page(summary), encoding="utf-8")

        try:
            self._write(self._run_dir / "trainer.json", write, "trainer.json")
        except StopRequested:
            self.report.say("no room for trainer.json; go on with --resume to have it written")
        hint = "" if finished else "; go on with --resume"
        outcome = "finished" if finished else "stopped"
        if finished and (reason := self.early_stop_reason) is not None:
            outcome += f" early, because {reason},"
        self.report.say(f"rl-trainer: {outcome} at step {step} of {self.trainer.args.max_steps}{hint}")

    def _write(self, final: Path, write: Callable[[str], object], what: str) -> None:
        """Let `write` make a file or folder that appears whole, as soon as there is room for it."""

        def attempt() -> None:
            with staged(final) as partial:
                write(str(partial))

        write_when_there_is_room(attempt, self.waits, final.parent, what)
