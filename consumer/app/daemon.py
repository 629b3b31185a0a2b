"""The trainer's life: start, run, stop. `consumer.app.wiring` has the parts and how they are wired.

Start: configuration of the libraries, dataset, journal, checkpoint, endpoint, model; then policy v is published and
producers may connect. Stop, in this order: the step in progress ends, a checkpoint is committed, the final adapter is
written, producers are told, sockets and journal close.
"""

import errno
import os
from contextlib import ExitStack, closing
from pathlib import Path

import datasets
import torch
import transformers

from consumer.app.feed import RecordedRun
from consumer.app.gpu_share import gpu_share
from consumer.app.setup import Setup
from consumer.app.wiring import live_run, recorded_run, watch_live
from consumer.prompts.generated import copy_rows
from consumer.ranks.placement import Placement
from consumer.ranks.team import team
from consumer.report.metrics import watch_ranks
from consumer.waiting import StopRequested
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError, ExitCode, JournalError
from protocol.exposition import Watch, watched
from protocol.runtime import logs
from protocol.runtime.signals import StopFlag, nothing_to_note
from protocol.wire.model_source import fetch_model


def run(config: RunConfig, placement: Placement, *, resume: bool, source: Path | None = None) -> ExitCode:
    """Train until done or told to stop.

    Args:
        resume: go on from what run_dir holds.
        source: run directory whose journal is trained again, without producers.

    Raises:
        SlipstreamError: what ended the run, for the user.
    """
    if source is not None:  # there are no producers with whom to share the GPU
        config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"gpu": "own"})})
        copy_rows(source, Path(config.run_dir))
    logs.adopt_libraries()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    gpus = list(placement.gpus)
    _prepare_device(gpus)
    with watched(config, "rl-trainer", gpus) as watch, ExitStack() as opened:
        logs.keep(Path(config.run_dir) / "trainer.log")
        fetch_model(config.model, watch.health)
        stop = StopFlag()  # until now a signal has ended this process
        with watch.health.starting("reading model and dataset", config.pipeline.stall_timeout_s):
            opened.enter_context(gpu_share(config, placement, stop))
            if stop():
                return ExitCode.OK
            try:
                setup = Setup.load(config, gpus, stop)
            except StopRequested:
                return ExitCode.OK
        try:
            if source is None:
                _train_live(setup, watch, placement, stop, resume=resume)
            else:
                _train_again(setup, watch, placement, source, resume=resume)
            return ExitCode.OK
        except OSError as error:
            if error.errno in (errno.EIO, errno.EROFS):  # the second is how Linux answers after the first
                fix = f"look at that of run_dir {config.run_dir}, then go on with --resume"
                raise JournalError(f"a disk failed ({error}); {fix}") from error
            raise


def _train_live(setup: Setup, watch: Watch, placement: Placement, stop: StopFlag, *, resume: bool) -> None:
    config, health = setup.config, watch.health
    with ExitStack() as opened:
        run = live_run(setup, watch, opened, placement.gpus, resume=resume)
        intake = run.intake
        with health.starting("loading the model", config.pipeline.stall_timeout_s):
            try:
                run.load(opened.enter_context(team(config, placement, run.lose_rank, setup.stop)), run.heartbeat)
                watch_ranks(watch.registry, run.trainer.works)
                run.enable_turns()
                run.publish(run.start.step)
                run.flush()
            except StopRequested:
                run.report.close()
                return
        intake.start()
        stop.is_noted = run.is_stop_noted
        watch_live(run, watch)
        health.started(f"listening at {config.control_endpoint}")
        run.report.say(f"rl-trainer: listening at {config.control_endpoint}; waiting for producers")
        finished = False
        try:
            finished = run.train()
            if finished and config.engine_server is not None and config.engine_server.final_name is not None:
                run.await_final()
        finally:
            health.stopping("finished" if finished else "saying goodbye to producers")
            intake.stop("finished" if finished else "stopping")
            stop.is_noted = nothing_to_note
            health.end("intake")
            run.report.close()
        counts = dict(run.storage.buffer.totals)
        rewards = run.storage.buffer.rewards
        dead = {name: count for name, count in rewards.dead(counts).items() if count}
        numbers = {"tokens_generated": intake.fleet.tokens_generated, "counts": counts, "dead_rewards": dead}
        for sentence in rewards.sentences(counts):
            run.report.say(f"rl-trainer: {sentence}")
        if run.turns is not None:
            numbers["gpu_turn_s"] = run.turns.spent_s()
        run.write_results(finished, numbers)


def _train_again(setup: Setup, watch: Watch, placement: Placement, source: Path, *, resume: bool) -> None:
    """Train the journal of `source` again, without producers."""
    config, health = setup.config, watch.health
    if Path(config.run_dir).resolve() == source.resolve():
        raise ConfigError(f"--from-journal {source}: choose another run_dir for the result (--set run_dir=...)")
    with closing(RecordedRun(source)) as recorded, ExitStack() as opened:
        run, heartbeat, counts = recorded_run(setup, recorded, watch, resume=resume)
        with health.starting("loading the model", config.pipeline.stall_timeout_s):
            try:
                ranks = opened.enter_context(team(config, placement, lambda error: None, setup.stop))
            except StopRequested:
                run.report.close()
                return
            run.load(ranks, heartbeat)
            watch_ranks(watch.registry, run.trainer.works)
            run.publish(run.start.step)
        health.started(f"training {source} again")
        finished = False
        try:
            finished = run.train()
        finally:
            run.report.close()
        run.write_results(finished, {"counts": dict(counts)})


def _prepare_device(gpus: list[int]) -> None:
    if not gpus:
        # One core is the engine's when both daemons share a machine.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) - 1)))
    elif torch.cuda.device_count() < 1:
        raise DeviceError(
            f"--gpu {','.join(map(str, gpus))}: torch {torch.__version__} sees no CUDA device; install a CUDA build of torch "
            "that fits the driver, or use --gpu cpu"
        )
