"""The trainer between its feed and its pipeline: from the first step to the final adapter.

Guarantee: it ends with every step taken, or with a checkpoint of the last one that was, unless the disk has no room for it;
the final adapter appears whole.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from consumer.arguments import REFUSALS
from consumer.checkpoints import Checkpoint
from consumer.evaluation_control import EvaluationControl
from consumer.inspection import keep, not_finite
from consumer.patience import Patience, StopRequested, write_when_there_is_room
from consumer.pipeline import Feed, Pipeline
from consumer.probe import Probe, probe_tokens
from consumer.progress import StepReport
from consumer.rollout_log import RolloutLog
from consumer.run_control import RunControl
from consumer.setup import Setup
from consumer.trainer import NotFiniteStep, SlipstreamTrainer
from protocol.errors import ConfigError, NotFiniteError


class TrainingLoop:
    """The trainer between its feed and its pipeline, from the first step to the final adapter."""

    def __init__(
        self,
        setup: Setup,
        pipeline: Pipeline,
        feed: Feed,
        report: StepReport,
        patience: Patience,
        start: Checkpoint | None,
        run_id: str,
        callbacks: Sequence[TrainerCallback] = (),
        evaluation: EvaluationControl | None = None,
    ) -> None:
        self._setup = setup
        self._evaluation = evaluation
        self._report = report
        self._patience = patience
        self._feed = feed
        self._start = start
        self._first_step = start.step if start else 0
        self.control = RunControl(
            pipeline,
            setup.budget,
            feed,
            report,
            patience,
            keep_checkpoints=setup.arguments.save_total_limit,
            run_id=run_id,
            stop_requested=setup.stop,
            evaluation=evaluation,
        )
        try:
            self._trainer = SlipstreamTrainer(
                setup.config,
                setup.arguments,
                setup.lora,
                setup.model_folder,
                feed,
                callbacks=[self.control, *callbacks],
                save_checkpoint=self.control.save,
            )
        except REFUSALS as error:
            raise ConfigError(f"TRL or PEFT refused to build the trainer: {error}") from error
        self.control.trainer = self._trainer
        if evaluation is not None:
            evaluation.log = self._trainer.log_now
        self.control.rollouts = RolloutLog.of(self._trainer, setup.config, self._first_step)
        self.control.probe = Probe(
            probe_tokens(setup.prompts, self._trainer._tokenizer, setup.config.seed),
            setup.config.swap.probe_every,
            self._trainer.accelerator.unwrap_model(self._trainer.model),
            self._trainer.accelerator.autocast,
        )
        if setup.initial_adapter is not None:
            self._trainer.start_from(setup.initial_adapter, resumed=start is not None)
        if start is not None:
            try:
                self._trainer._load_from_checkpoint(str(start.folder))  # before the first policy is published
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"run_dir: {start.folder} does not fit model.path and lora: {error}") from error

    def train(self, describe: Callable[[], str] = lambda: "") -> bool:
        """Returns whether the run is finished: every step was taken and the last version evaluated, as far as it could be, or
        evaluations said that it is enough.

        Args:
            describe: says who waits for whom.
        """
        self._started = time.monotonic()
        trainer, max_steps = self._trainer, self._setup.arguments.max_steps
        finished = False
        try:
            if self._first_step < max_steps and self.control.seen_enough is None:
                trainer.train(resume_from_checkpoint=str(self._start.folder) if self._start else None)
            else:  # transformers would wait for one batch more
                trainer.state.global_step = self._first_step
            finished = trainer.state.global_step >= max_steps or self.control.seen_enough is not None
            if self._evaluation is not None and trainer.state.global_step >= max_steps:
                self._evaluation.wait_for_last(self._patience, describe)
        except NotFiniteStep as found:
            raise NotFiniteError(self._explain(found)) from found
        except StopRequested:
            if finished:
                self._report.say("stopped before the last evaluation was done")
                return False
            try:
                self.control.save_if_needed(self._first_step)
            except StopRequested:
                self._report.say("no room for a checkpoint: the steps since the last one will be taken again")
        return bool(finished or (self._evaluation is None and trainer.state.global_step >= max_steps))

    def _explain(self, found: NotFiniteStep) -> str:
        """Keeps the batch, and says what was found and how to go on."""
        trainer, run_dir = self._trainer, Path(self._setup.config.run_dir)
        step, batch = trainer.state.global_step + 1, self._feed.last
        assert batch is not None
        weights = not_finite(trainer.model.named_parameters(), lambda parameter: parameter)
        numbers = {
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
            "weights_not_finite": weights,
            "gradients_not_finite": not_finite(trainer.model.named_parameters(), lambda parameter: parameter.grad),
        }
        folder = keep(run_dir, step, batch, numbers)
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
            f"(step.json, groups.safetensors; `rl-journal show` decodes a group). {cause}"
        )

    def write_results(self, finished: bool, numbers: dict[str, Any]) -> None:
        """The final adapter, a summary for programs and one for people."""
        run_dir, step = Path(self._setup.config.run_dir), self._trainer.state.global_step
        summary = {"finished": finished, "steps": step, "wall_s": time.monotonic() - self._started} | numbers
        if self._evaluation is not None:
            best = self._evaluation.best
            summary |= {
                "stopped_early": self.control.seen_enough,
                "best": best and {**best, "folder": "checkpoints/best"},
            }

        def write() -> None:
            if finished:
                self._trainer.save_model(str(run_dir / "adapter.partial"))
                shutil.rmtree(run_dir / "adapter", ignore_errors=True)
                (run_dir / "adapter.partial").rename(run_dir / "adapter")
            (run_dir / "trainer.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")

        try:
            write_when_there_is_room(write, self._patience, run_dir, "the adapter")
        except StopRequested:
            self._report.say("no room for the adapter; go on with --resume to have it written")
        hint = "" if finished else "; go on with --resume"
        outcome = "finished" if finished else "stopped"
        if finished and (reason := self.control.seen_enough) is not None:
            outcome += f" early, because {reason},"
        self._report.say(f"rl-trainer: {outcome} at step {step} of {self._setup.arguments.max_steps}{hint}")
