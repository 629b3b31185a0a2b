"""The trainer's life: wiring, start, run, stop. No logic of its own.

Start: configuration of the libraries, dataset, journal, checkpoint, endpoint, model; then version v is published and the
doors open. Stop, in this order: the step in progress ends, a checkpoint is committed, the final adapter is written,
producers are told, sockets and journal close.
"""

import errno
import logging
import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from consumer.assembly.evaluation import evaluation_of
from consumer.assembly.rollouts import rollout_buffer, staleness_controller
from consumer.checkpoints import folders as checkpoints
from consumer.checkpoints.run_facts import comparable, dataset_change
from consumer.evaluation.control import EvaluationControl
from consumer.intake.dispatcher import LeaseDesk
from consumer.intake.intake import Intake
from consumer.prompts.dataset import PromptDataset
from consumer.prompts.placeholders import Placeholders
from consumer.prompts.source import PromptSource
from consumer.prompts.transformed import read_aside
from consumer.reporting.evaluation_metrics import watch_evaluation
from consumer.reporting.metrics import TrainerMetrics
from consumer.training.feed import BatchFeed
from consumer.training.heartbeat import Heartbeat
from consumer.training.loop import TrainingLoop
from consumer.training.pipeline import LivePipeline
from consumer.training.retraining import RecordedFeed, RecordedRun, RetrainingPipeline
from consumer.training.run_components import Setup
from consumer.training.trainer import build_arguments, build_lora
from consumer.waiting import Patience, StopRequested
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError, ExitCode, JournalError
from protocol.files.shared_memory import SharedMemory, shared_memory
from protocol.security.keys import trainer_keys
from protocol.service import logs
from protocol.service.health import Health
from protocol.service.observability import Watch, watched
from protocol.transport.zeromq_server import ZmqServer
from protocol.wire.handshake import TrainerNeeds
from protocol.wire.messages import Sampling
from replay.buffer import RolloutBuffer
from replay.journal.disk import DiskGuard
from replay.journal.writer import Journal

logger = logging.getLogger(__name__)


def check_libraries(config: RunConfig) -> None:
    """Validates the `trainer` and `lora` sections by TRL and PEFT, without loading a model."""
    build_lora(config)
    build_arguments(config, on_gpu=False, num_prompts=1)


def run(config: RunConfig, gpus: list[int], *, resume: bool, source: Path | None = None) -> ExitCode:
    """Trains until done or told to stop.

    Args:
        resume: go on from what run_dir holds.
        source: run directory whose journal is trained again, without producers.

    Raises:
        SlipstreamError: what ended the run, for the user.
    """
    stop = _StopFlag()
    logs.adopt_libraries()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    _prepare_device(gpus)
    with watched(config, "rl-trainer", gpus) as watch:
        with watch.health.starting("reading model and dataset", config.pipeline.stall_timeout_s):
            setup = Setup.load(config, gpus, stop)
        try:
            return _train_live(setup, resume, watch) if source is None else _train_again(setup, resume, source, watch)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EROFS):  # the second is how Linux answers after the first
                fix = f"look at that of run_dir {config.run_dir}, then go on with --resume"
                raise JournalError(f"a disk failed ({error}); {fix}") from error
            raise


def _train_live(setup: Setup, resume: bool, watch: Watch) -> ExitCode:
    config, health = setup.config, watch.health
    metrics = TrainerMetrics(watch.registry)
    with ExitStack() as ended:
        journal = ended.enter_context(closing(Journal(config.journal_file, metrics.commit_s.observe)))
        checkpoints.clear_leftovers(config.checkpoints_dir)
        before = journal.facts()
        start = checkpoints.starting_point(
            Path(config.run_dir), config.checkpoints_dir, has_groups=journal.last_seq > 0, resume=resume
        )
        if start is not None and "ledger" not in start.state:
            raise ConfigError(
                f"run_dir: {config.run_dir} was trained with --from-journal; go on with that, or choose another"
            )
        run_id = start.run_id if start else before.get("run_id") or secrets.token_hex(8)
        if before.get("run_id", run_id) != run_id:
            raise ConfigError(f"run_dir: {journal.path} belongs to another run than {start.folder if start else ''}")
        logs.bind(run=run_id)
        first_step = start.step if start else 0
        facts = setup.facts(run_id)
        same_shape = comparable(before, facts, journal.path)
        if start is not None or journal.last_seq > 0:
            changed = dataset_change(before, facts, journal.path)
            if changed:
                logger.warning("%s", changed)
        journal.note_facts(facts)

        session = secrets.token_hex(4)  # of this process; the run may outlive it
        buffer = rollout_buffer(setup, journal, session)
        buffer.restore(start.state if start else None, step=first_step, shape=setup.shape, comparable=same_shape)
        if start is not None:
            logger.info("resuming at step %d from %s", first_step, start.folder)
        disk = DiskGuard(Path(config.run_dir), config.replay.max_disk_used)
        channel = _channel(config)
        memory = ended.enter_context(shared_memory())
        report = setup.report(buffer.counts, first_step, watch.registry)

        def read(prompts: PromptDataset | Placeholders) -> PromptSource:
            return ended.enter_context(read_aside(prompts, channel.wake))

        evaluation = evaluation_of(setup, channel, read, session, first_step, report.say)
        intake = _intake(
            setup, read(setup.prompts), channel, journal, buffer, disk, facts, session, memory,
            lambda: health.beat("intake"), evaluation, resumed=start is not None or bool(before),
        )  # fmt: skip

        def beat() -> None:
            _beat(health, setup.stop)

        def check() -> None:
            beat()
            if setup.stop():
                raise StopRequested
            intake.check()
            pipeline.check()

        patience = Patience(check=check, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s)
        staleness = staleness_controller(config, start.state if start else {})
        pipeline = ended.enter_context(
            closing(LivePipeline(buffer, journal, intake, patience, disk, config.replay, staleness, evaluation))
        )
        feed = BatchFeed(buffer, intake, patience, partial_after_s=config.pipeline.partial_after_s)
        with health.starting("loading the model", config.pipeline.stall_timeout_s):
            loop = TrainingLoop(setup, pipeline, feed, report, patience, start, run_id, [Heartbeat(beat)], evaluation)
            try:
                loop.control.publish(first_step)
                pipeline.flush()
            except StopRequested:
                report.close()
                return ExitCode.OK
        intake.start()
        metrics.watch(run_id, buffer, intake, channel.refusals.counts, feed.waiting_s, disk, config.journal_file)
        watch_evaluation(watch.registry, evaluation)
        health.check_alive("disk", disk.complaint)
        health.check_ready("journal", journal.complaint)
        health.check_ready("producers", lambda: None if intake.num_producers else "none is connected")
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
        loop.write_results(finished, {"tokens_generated": intake.tokens_generated, "counts": dict(buffer.counts)})
    return ExitCode.OK


def _train_again(setup: Setup, resume: bool, source: Path, watch: Watch) -> ExitCode:
    """From the journal of `source` alone."""
    config = setup.config
    if Path(config.run_dir).resolve() == source.resolve():
        raise ConfigError(f"--from-journal {source}: choose another run_dir for the result (--set run_dir=...)")
    with closing(RecordedRun(source)) as recorded:
        run_id = recorded.check(setup.facts("?"))
        logs.bind(run=run_id)
        torch.set_num_threads(recorded.num_threads)
        checkpoints.clear_leftovers(config.checkpoints_dir)
        start = checkpoints.starting_point(
            Path(config.run_dir), config.checkpoints_dir, has_groups=False, resume=resume
        )
        first_step = start.step if start else 0
        counts: Counter[str] = Counter()
        report = setup.report(counts, first_step, watch.registry)

        def beat() -> None:
            _beat(watch.health, setup.stop)

        def check() -> None:
            beat()
            if setup.stop():
                raise StopRequested

        patience = Patience(check=check, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s)
        feed = RecordedFeed(recorded, setup.shape, check, first_step, counts)
        with watch.health.starting("loading the model", config.pipeline.stall_timeout_s):
            loop = TrainingLoop(setup, RetrainingPipeline(), feed, report, patience, start, run_id, [Heartbeat(beat)])
        watch.health.started(f"training {source} again")
        finished = False
        try:
            finished = loop.train()
        finally:
            report.close()
        loop.write_results(finished, {"counts": dict(counts)})
    return ExitCode.OK


def _channel(config: RunConfig) -> ZmqServer:
    transport = config.transport
    keys = trainer_keys(Path(transport.keys)) if transport.keys else None
    return ZmqServer(config.control_endpoint, config.blob_endpoint, transport.max_message_bytes, keys)


def _intake(
    setup: Setup,
    prompts: PromptSource,
    channel: ZmqServer,
    journal: Journal,
    buffer: RolloutBuffer,
    disk: DiskGuard,
    facts: dict[str, str],
    session: str,
    memory: SharedMemory,
    beat: Callable[[], None],
    evaluation: EvaluationControl | None,
    *,
    resumed: bool,
) -> Intake:
    config = setup.config
    sampling = config.sampling
    desk = LeaseDesk(
        channel,
        buffer,
        prompts,
        disk,
        sampling=Sampling(
            sampling.num_generations,
            sampling.max_completion_length,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
        ),
        timeout_s=config.pipeline.lease_timeout_s,
    )
    return Intake(
        channel,
        buffer,
        journal,
        disk,
        desk,
        needs=TrainerNeeds(
            base_model_digest=facts["base_model_digest"],
            tokenizer_digest=facts["tokenizer_digest"],
            dtype=config.model.dtype,
            lora_rank=config.lora["r"],
            max_loras=config.training_loras,
            max_completion_length=sampling.max_completion_length,
            reward_names=config.reward_names,
        ),
        shape=setup.shape,
        run_id=facts["run_id"],
        session=session,
        resumed=resumed,
        heartbeat_interval_s=config.transport.heartbeat_interval_s,
        heartbeat_timeout_s=config.transport.heartbeat_timeout_s,
        keep_blobs=config.max_loras,
        evaluations=evaluation.desk if evaluation else None,
        memory=memory,
        beat=beat,
    )


def _beat(health: Health, stop_requested: Callable[[], bool]) -> None:
    """The main thread came round. Asked to stop, it says so at once, because the step in progress may take long."""
    if stop_requested():
        health.stopping("the step in progress ends, then a checkpoint is written")
    health.beat("training")


class _StopFlag:
    """Set by the first SIGTERM or SIGINT; the second one ends the process at once."""

    def __init__(self) -> None:
        self._requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        return self._requested

    def _handle(self, number: int, frame: Any) -> None:
        if self._requested:
            os._exit(ExitCode.INTERRUPTED)
        self._requested = True


def _prepare_device(gpus: list[int]) -> None:
    if not gpus:
        # One core is the engine's when both daemons share a machine.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 2) - 1)))
    elif torch.cuda.device_count() < len(gpus):
        raise DeviceError(
            f"--gpu {','.join(map(str, gpus))}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "install a CUDA build of torch that fits the driver, or use --gpu cpu"
        )
    elif len(gpus) > 1:
        raise DeviceError("rl-trainer takes one GPU: LoRA steps fit one; give the others to producers")
