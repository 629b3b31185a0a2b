"""A trainer with producers: everything but the model, in the order in which the parts need each other. Wiring only."""

import logging
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from consumer.assembly.rollouts import evaluation_of, rollout_buffer, staleness_controller
from consumer.checkpoints import folders as checkpoints
from consumer.checkpoints.run_facts import comparable, dataset_change
from consumer.intake.arrivals import RolloutStorage
from consumer.intake.dispatcher import EvaluationDispatcher, LeaseDispatcher
from consumer.intake.fleet import SessionTerms
from consumer.intake.intake import Dispatchers, Intake
from consumer.prompts.dataset import Placeholders, PromptDataset
from consumer.prompts.source import PromptSource
from consumer.prompts.transformed import read_aside
from consumer.publishing.offered_bundle import offered_bundle
from consumer.publishing.policy_store import PolicyStore
from consumer.reporting.metrics import commit_seconds, watch_evaluation, watch_trainer
from consumer.training.callbacks import Heartbeat
from consumer.training.feed import BatchFeed
from consumer.training.pipeline import Connections, LivePipeline
from consumer.training.run_components import RunComponents, RunStart
from consumer.training.trainer import SlipstreamTrainer
from consumer.turns.metrics import watch_turns
from consumer.turns.moves import DeviceMoves
from consumer.turns.turns import GpuTurns
from consumer.waiting import ThreadErrors, WaitPolicy
from protocol.channel.keys import trainer_keys
from protocol.channel.server import ZmqServer
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RankLostError
from protocol.exposition import Watch
from protocol.gpu.nvml import gpu_facts
from protocol.gpu.reservation import say_waiting, tenancy
from protocol.runtime import logs
from protocol.runtime.logs import Throttle
from protocol.runtime.scratch import shared_memory
from protocol.wire.handshake import TrainerNeeds
from replay.journal.disk import DiskGuard
from replay.journal.writer import Journal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveRun:
    """What the daemon starts, runs and stops."""

    start: RunStart
    channel: ZmqServer
    storage: RolloutStorage
    intake: Intake
    feed: BatchFeed
    connections: Connections
    heartbeat: Heartbeat
    errors: ThreadErrors
    turns: GpuTurns | None = None

    def carry(self, trainer: SlipstreamTrainer) -> None:
        """Where the GPU is shared, the model comes and goes with the trainer's turns from now on."""
        if self.turns is not None:
            moves = DeviceMoves(trainer.accelerator.device, trainer.kept_tensors, trainer.forget_batch)
            self.turns.carry(moves, self.connections.pipeline.flush, self.intake.wake)

    def lost(self, error: RankLostError) -> None:
        """A rank was lost, which is not the fault of the batch in progress. May be called by any thread."""
        self.errors.note(error)
        self._undo_try()

    def beat(self) -> None:
        """The intake's thread comes round. Once a stop is requested the batch in progress is not to blame for an end of the
        process, because a second signal, or a supervisor that waits no longer, may cut its step short."""
        self.heartbeat.health.beat("intake")
        if self.heartbeat.stop_requested():
            self._undo_try()

    def _undo_try(self) -> None:
        if self.feed.last is not None:
            self.connections.pipeline.undo_try(self.feed.last.last_step)


def live_run(
    components: RunComponents, watch: Watch, opened: ExitStack, gpus: Sequence[int], *, resume: bool
) -> LiveRun:
    """
    Args:
        opened: closes what is opened here.
        gpus: of the trainer, by their indexes.

    Raises:
        ConfigError: run_dir holds another run, or one that nobody said to go on with.
    """
    config, settings = components.config, components.config.pipeline
    journal = opened.enter_context(closing(Journal(config.journal_file, commit_seconds(watch.registry).observe)))
    before = journal.facts()
    start = _start(config, journal, before, resume)
    facts = components.facts(start.run_id)
    same_shape = _comparable(start, journal, before, facts)
    journal.note_facts(facts)

    session = secrets.token_hex(4)  # of this process; the run may outlive it
    buffer = rollout_buffer(components, journal, session)
    buffer.restore(start.state or None, step=start.step, shape=components.shape, comparable=same_shape)
    if start.checkpoint is not None:
        logger.info("resuming at step %d from %s", start.step, start.checkpoint.folder)
    storage = RolloutStorage(buffer, journal, DiskGuard(Path(config.run_dir), config.replay.max_disk_used))
    channel = _channel(config)
    store = PolicyStore(config.max_loras, opened.enter_context(shared_memory()))
    report = components.report(buffer.totals, start.step, watch.registry)

    def read(prompts: PromptDataset | Placeholders) -> PromptSource:
        return opened.enter_context(read_aside(prompts, channel.wake))

    warn = Throttle(logger)
    prompts, sampling = read(components.prompts), config.sampling.message
    evaluation = evaluation_of(components, channel, store, read, session, start.step, report.say)
    dispatchers = Dispatchers(
        LeaseDispatcher(channel, buffer, prompts, storage.disk, sampling, settings.lease_timeout_s, warn),
        evaluation.leases if evaluation else EvaluationDispatcher(store),
    )
    errors = ThreadErrors()
    heartbeat = Heartbeat(watch.health, components.stop, errors)
    resumed = start.checkpoint is not None or bool(before)
    turns = _turns(components, gpus, opened, resumed=resumed) if settings.gpu == "turns" else None
    terms = _terms(components, facts, session, turns)
    intake = Intake(channel, storage, dispatchers, store, terms, errors, lambda: run.beat())
    waits = WaitPolicy(check=heartbeat.check, say=report.say, stall_timeout_s=settings.stall_timeout_s)
    staleness = staleness_controller(config, start.state)
    pipeline = LivePipeline(storage, intake, waits, errors, config.replay, staleness, evaluation)
    opened.enter_context(closing(pipeline))
    feed = BatchFeed(buffer, intake, waits, settings.partial_after_s, turns)
    connections = Connections(feed, pipeline, report, waits, evaluation, feed if turns else None)
    run = LiveRun(start, channel, storage, intake, feed, connections, heartbeat, errors, turns)
    return run


def watch_live(run: LiveRun, watch: Watch) -> None:
    """Metrics and health checks. Only after the first policy was published."""
    registry, health = watch.registry, watch.health
    _, journal, disk = run.storage
    watch_trainer(registry, run.start.run_id, run.storage, run.intake, run.channel.refusals.counts, run.feed.waiting_s)
    watch.targets.add(run.intake.fleet.targets)
    watch_evaluation(registry, run.connections.evaluation)
    watch_turns(registry, run.turns)
    health.check_alive("disk", disk.complaint)
    health.check_ready("journal", journal.complaint)
    health.check_ready("producers", lambda: None if run.intake.fleet.sessions else "none is connected")


def _start(config: RunConfig, journal: Journal, before: dict[str, str], resume: bool) -> RunStart:
    found = checkpoints.starting_point(
        Path(config.run_dir), config.checkpoints_dir, has_groups=journal.last_seq > 0, resume=resume
    )
    if found is not None and "ledger" not in found.state:
        raise ConfigError(
            f"run_dir: {config.run_dir} was trained with --from-journal; go on with that, or choose another"
        )
    run_id = found.run_id if found else before.get("run_id") or secrets.token_hex(8)
    if before.get("run_id", run_id) != run_id:
        raise ConfigError(f"run_dir: {journal.path} belongs to another run than {found.folder if found else ''}")
    checkpoints.clear_leftovers(config.checkpoints_dir)
    logs.bind(run=run_id)
    return RunStart(run_id, found)


def _turns(components: RunComponents, gpus: Sequence[int], opened: ExitStack, *, resumed: bool) -> GpuTurns:
    """A producer that has lost its trainer greets the next one within `heartbeat_timeout_s`, and again within a moment."""
    config, pipeline = components.config, components.config.pipeline
    settle_s = 1.0 + 1.25 * config.transport.heartbeat_timeout_s if resumed else 0.0
    gpu = gpu_facts(gpus[0]) if gpus else None
    if gpu is None:
        return GpuTurns(gpus, pipeline.gpu_handover_s, settle_s)
    own = opened.enter_context(tenancy(gpu.uuid, "trainer", config.run_dir))
    stay = partial(own.alone, pipeline.stall_timeout_s, say=say_waiting)
    return GpuTurns(gpus, pipeline.gpu_handover_s, settle_s, stay)


def _comparable(start: RunStart, journal: Journal, before: dict[str, str], facts: dict[str, str]) -> bool:
    """Whether the groups in the journal can be trained now."""
    same_shape = comparable(before, facts, journal.path)
    if start.checkpoint is not None or journal.last_seq > 0:
        changed = dataset_change(before, facts, journal.path)
        if changed:
            logger.warning("%s", changed)
    return same_shape


def _channel(config: RunConfig) -> ZmqServer:
    transport = config.transport
    keys = trainer_keys(Path(transport.keys)) if transport.keys else None
    return ZmqServer(config.control_endpoint, config.blob_endpoint, transport.max_message_bytes, keys)


def _terms(components: RunComponents, facts: dict[str, str], session: str, turns: GpuTurns | None) -> SessionTerms:
    config, host = components.config, socket.gethostname()[:128]
    needs = TrainerNeeds(
        base_model_digest=facts["base_model_digest"],
        tokenizer_digest=facts["tokenizer_digest"],
        dtype=config.model.dtype,
        lora_rank=config.lora["r"],
        max_loras=config.training_loras,
        max_completion_length=config.sampling.max_completion_length,
        reward_names=config.reward_names,
        engine_quantization=str(config.engine.get("quantization") or ""),
        quantization=config.model.quantization or "",
    )
    return SessionTerms(
        needs,
        components.shape,
        facts["run_id"],
        session,
        config.pipeline.lease_timeout_s,
        config.transport.heartbeat_interval_s,
        config.transport.heartbeat_timeout_s,
        host,
        config.transport.region or host,
        offered_bundle(config, Path.cwd()),
        turns,
    )
