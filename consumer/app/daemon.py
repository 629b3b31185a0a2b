"""The trainer's life: start, run, stop. `consumer.app.wiring` has the parts and how they are wired.

Start: configuration of the libraries, dataset, journal, checkpoint, endpoint, model; then policy v is published and
producers may connect. Stop, in this order: the step in progress ends, a checkpoint is committed, the final adapter is
written, producers are told, sockets and journal close.
"""

import errno
import os
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from consumer.app.feed import RecordedRun
from consumer.app.gpu_share import gpu_share
from consumer.app.run_components import RunComponents
from consumer.app.wiring import live_run, retraining, training_loop, watch_live
from consumer.learn.options import build_arguments, build_lora
from consumer.ranks.placement import Placement
from consumer.ranks.team import team
from consumer.report.metrics import watch_ranks
from consumer.waiting import StopRequested
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError, ExitCode, JournalError
from protocol.exposition import Watch, watched
from protocol.runtime import logs


def check_libraries(config: RunConfig) -> None:
    """Validates the `trainer` and `lora` sections by TRL and PEFT, without loading a model."""
    build_lora(config)
    build_arguments(config, on_gpu=False, num_prompts=1)


def run(config: RunConfig, placement: Placement, *, resume: bool, source: Path | None = None) -> ExitCode:
    """Trains until done or told to stop.

    Args:
        resume: go on from what run_dir holds.
        source: run directory whose journal is trained again, without producers.

    Raises:
        SlipstreamError: what ended the run, for the user.
    """
    if source is not None:  # there are no producers with whom to share the GPU
        config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"gpu": "own"})})
    stop = _StopFlag()
    logs.adopt_libraries()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    gpus = list(placement.gpus)
    _prepare_device(gpus)
    with watched(config, "rl-trainer", gpus) as watch, ExitStack() as opened:
        with watch.health.starting("reading model and dataset", config.pipeline.stall_timeout_s):
            opened.enter_context(gpu_share(config, placement, stop))
            if stop():
                return ExitCode.OK
            try:
                components = RunComponents.load(config, gpus, stop)
            except StopRequested:
                return ExitCode.OK
        try:
            if source is None:
                _train_live(components, watch, placement, resume=resume)
            else:
                _train_again(components, watch, placement, source, resume=resume)
            return ExitCode.OK
        except OSError as error:
            if error.errno in (errno.EIO, errno.EROFS):  # the second is how Linux answers after the first
                fix = f"look at that of run_dir {config.run_dir}, then go on with --resume"
                raise JournalError(f"a disk failed ({error}); {fix}") from error
            raise


def _train_live(components: RunComponents, watch: Watch, placement: Placement, *, resume: bool) -> None:
    config, health = components.config, watch.health
    with ExitStack() as opened:
        run = live_run(components, watch, opened, placement.gpus, resume=resume)
        report, intake = run.connections.report, run.intake
        with health.starting("loading the model", config.pipeline.stall_timeout_s):
            try:
                ranks = opened.enter_context(team(config, placement, run.lost, components.stop))
                loop = training_loop(components, run.connections, run.start, [run.heartbeat], ranks)
                watch_ranks(watch.registry, loop.trainer.works)
                run.carry(loop.trainer)
                loop.control.publish(run.start.step)
                run.connections.pipeline.flush()
            except StopRequested:
                report.close()
                return
        intake.start()
        watch_live(run, watch)
        health.started(f"listening at {config.control_endpoint}")
        report.say(f"rl-trainer: listening at {config.control_endpoint}; waiting for producers")
        finished = False
        try:
            finished = loop.train(intake.describe)
        finally:
            health.stopping("finished" if finished else "saying goodbye to producers")
            intake.stop("finished" if finished else "stopping")
            health.end("intake")
            report.close()
        counts = dict(run.storage.buffer.totals)
        numbers = {"tokens_generated": intake.fleet.tokens_generated, "counts": counts}
        if run.turns is not None:
            numbers["gpu_turn_s"] = run.turns.spent_s()
        loop.write_results(finished, numbers)


def _train_again(components: RunComponents, watch: Watch, placement: Placement, source: Path, *, resume: bool) -> None:
    """From the journal of `source` alone."""
    config, health = components.config, watch.health
    if Path(config.run_dir).resolve() == source.resolve():
        raise ConfigError(f"--from-journal {source}: choose another run_dir for the result (--set run_dir=...)")
    with closing(RecordedRun(source)) as recorded, ExitStack() as opened:
        start, connections, heartbeat, counts = retraining(components, recorded, watch, resume=resume)
        with health.starting("loading the model", config.pipeline.stall_timeout_s):
            try:
                ranks = opened.enter_context(team(config, placement, lambda error: None, components.stop))
            except StopRequested:
                connections.report.close()
                return
            loop = training_loop(components, connections, start, [heartbeat], ranks)
            watch_ranks(watch.registry, loop.trainer.works)
            loop.control.publish(start.step)
        health.started(f"training {source} again")
        finished = False
        try:
            finished = loop.train()
        finally:
            connections.report.close()
        loop.write_results(finished, {"counts": dict(counts)})


_NOTED_WITHIN_S = 0.5


class _StopFlag:
    """Set by the first SIGTERM or SIGINT. The second one ends the process, as soon as the intake has had the time to note the
    first one in the journal (`LiveRun.beat`)."""

    def __init__(self) -> None:
        self._requested_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        return self._requested_at is not None

    def _handle(self, number: int, frame: Any) -> None:
        if self._requested_at is not None:
            time.sleep(max(0.0, self._requested_at + _NOTED_WITHIN_S - time.monotonic()))
            os._exit(ExitCode.INTERRUPTED)
        self._requested_at = time.monotonic()


def _prepare_device(gpus: list[int]) -> None:
    if not gpus:
        # One core is the engine's when both daemons share a machine.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 2) - 1)))
    elif torch.cuda.device_count() < 1:
        raise DeviceError(
            f"--gpu {','.join(map(str, gpus))}: torch {torch.__version__} sees no CUDA device; install a CUDA build of torch "
            "that fits the driver, or use --gpu cpu"
        )
