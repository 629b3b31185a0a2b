"""The trainer between its feed and its pipeline: from the first step to the final adapter.

Guarantee: it ends with every step taken, or with a checkpoint of the last one that was, unless the disk has no room for it.
After the last step the final adapter is on the disk before anything else happens, and where an evaluation of it follows, so is a
checkpoint: a run that is stopped or killed meanwhile goes on with the evaluation and takes no step again.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consumer.learn.checkpoints import is_committed
from consumer.learn.loss import NotFiniteStep
from consumer.learn.memory import is_out_of_memory
from consumer.learn.micro_batches import CompletionTooLargeError
from consumer.learn.trainer import SlipstreamTrainer
from consumer.report.inspection import keep, not_finite
from consumer.training.callbacks import RunControl
from consumer.training.pipeline import Connections
from consumer.training.run_components import RunStart
from consumer.waiting import StopRequested, write_when_there_is_room
from protocol.errors import DeviceError, NotFiniteError
from protocol.runtime.files import staged
from protocol.runtime.json_lines import encode_page


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
