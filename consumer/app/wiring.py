"""A trainer with producers: everything but the model, in the order in which the parts need each other. Wiring only."""

import dataclasses
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import TrainerCallback

from consumer.app.feed import BatchFeed, RecordedFeed, RecordedRun
from consumer.app.pipeline import CheckpointWriter, Connections, Feed, LivePipeline, Pipeline
from consumer.app.run_components import RunComponents, RunStart
from consumer.app.training_loop import Heartbeat, RunControl, TrainingLoop
from consumer.evaluate.control import EvaluationControl
from consumer.evaluate.leases import EvaluationLeases, EvaluationRules
from consumer.evaluate.results import EvaluationQueue, EvaluationResults
from consumer.learn import checkpoints as checkpoints
from consumer.learn.micro_batches import Recorded
from consumer.learn.model import loading, unquantized_probe
from consumer.learn.run_facts import comparable, dataset_change
from consumer.learn.trainer import SlipstreamTrainer
from consumer.link.commit_queue import RolloutStorage
from consumer.link.device_moves import DeviceMoves
from consumer.link.dispatcher import LeaseDispatcher
from consumer.link.fleet import SessionTerms
from consumer.link.gpu_turns import GpuTurns
from consumer.link.intake import Intake
from consumer.link.offered_bundle import offered_bundle
from consumer.link.policy_store import PolicyStore
from consumer.link.snapshots import Probe, probe_tokens
from consumer.ranks.exchange import ALONE, Ranks, begin
from consumer.report.metrics import commit_seconds, watch_evaluation, watch_trainer, watch_turns
from consumer.report.sampled_rollouts import RolloutLog
from consumer.waiting import ThreadErrors, WaitPolicy
from protocol.channel.channel import ServerChannel
from protocol.channel.keys import trainer_keys
from protocol.channel.server import ZmqServer
from protocol.config.data import WEIGHTED_SUM, EvaluationSection
from protocol.config.learning import PipelineSection
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RankLostError
from protocol.exposition import Watch
from protocol.gpu.nvml import gpu_facts
from protocol.gpu.reservation import say_waiting, tenancy
from protocol.runtime import logs
from protocol.runtime.logs import Throttle
from protocol.runtime.scratch import shared_memory
from protocol.wire.handshake import TrainerNeeds
from replay.batch_selection import BatchSelector
from replay.buffer import RolloutBuffer
from replay.evaluation_leases import Metric
from replay.journal.retention import DiskGuard
from replay.journal.writer import Journal
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import FailureClass, FailureWatch, RetryBudget
from replay.replay_table import ReplayTable
from replay.rerolls import RerollRules
from replay.rewards import SignalWatch

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

    warn = Throttle(logger)
    prompts, sampling = components.prompts, config.sampling.message
    evaluation = evaluation_of(components, channel, store, session, start.step, report.say)
    dispatcher = LeaseDispatcher(
        channel, buffer, prompts, storage.disk, sampling, settings.lease_timeout_s, warn,
        evaluations=evaluation.leases if evaluation else None,
    )  # fmt: skip
    errors = ThreadErrors()
    heartbeat = Heartbeat(watch.health, components.stop, errors)
    resumed = start.checkpoint is not None or bool(before)
    turns = _turns(components, gpus, opened, resumed=resumed) if settings.gpu == "turns" else None
    terms = _terms(components, facts, session, turns)
    intake = Intake(channel, storage, dispatcher, store, terms, errors, lambda: run.beat())
    waits = WaitPolicy(check=heartbeat.check, say=report.say, stall_timeout_s=settings.stall_timeout_s)
    pipeline = LivePipeline(storage, intake, waits, errors, config.replay, evaluation)
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


def rollout_buffer(components: RunComponents, journal: Journal, session: str) -> RolloutBuffer:
    """An empty buffer.

    Args:
        session: unique per trainer process.
    """
    config = components.config
    pipeline, reroll = config.pipeline, config.reroll
    ledger = PromptLedger(
        len(components.prompts),
        seed=config.seed,
        shuffle=config.dataset.shuffle,
        budgets=retry_budgets(pipeline),
        session=session,
        rerolls=reroll,
    )
    selector = BatchSelector(
        components.budget,
        journal,
        signal=components.rewards.signal,
        replay=ReplayTable(config.replay, config.seed) if config.replay.mode == "signal" else None,
        max_replayed=min(int(config.replay.max_share * pipeline.groups_per_step), pipeline.groups_per_step - 1),
        partial=pipeline.fill == "partial",
    )
    return RolloutBuffer(
        ledger,
        selector,
        journal,
        RerollRules(reroll, config.reward_names.index(reroll.reward) if reroll.reward else 0),
        components.rewards.mean_reward,
        FailureWatch(pipeline.max_failed_share),
        SignalWatch(config.guards.max_groups_without_signal),
    )


def retry_budgets(pipeline: PipelineSection) -> dict[FailureClass, RetryBudget]:
    """How often a prompt is tried again, for training and for evaluations alike."""
    return {
        "data": RetryBudget(pipeline.max_data_attempts, pipeline.data_backoff_s),
        "infra": RetryBudget(pipeline.max_infra_attempts, pipeline.infra_backoff_s),
    }


def evaluation_of(
    components: RunComponents,
    channel: ServerChannel,
    store: PolicyStore,
    session: str,
    first_step: int,
    say: Callable[..., None],
) -> EvaluationControl | None:
    """None for a run without evaluations.

    Args:
        session: unique per trainer process.
        first_step: steps taken before this process.
    """
    config, section = components.config, components.config.evaluation
    if section is None or components.held_out is None:
        return None
    pipeline, run_dir = config.pipeline, Path(config.run_dir)
    results = EvaluationResults(run_dir, config.checkpoints_dir, section, first_step, pipeline.max_failed_share)
    due = EvaluationQueue(run_dir)
    due.restore(first_step, results.versions)
    rules = EvaluationRules(
        num_prompts=min(len(components.held_out), section.max_prompts or len(components.held_out)),
        sampling=msgspec.structs.replace(
            config.sampling.message,
            num_generations=section.num_completions,
            temperature=section.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
        ),
        metric=_metric(config, section),
        shape=dataclasses.replace(components.shape, num_generations=section.num_completions),
        budgets=retry_budgets(pipeline),
        per_place=max(1, config.sampling.num_generations // section.num_completions),
        timeout_s=pipeline.lease_timeout_s,
        session=session,
    )
    return EvaluationControl(
        section,
        due,
        results,
        EvaluationLeases(store, channel, due, components.held_out, rules, Throttle(logger)),
        run_dir=run_dir,
        reward_names=config.reward_names,
        last_version=components.budget.version_at(components.arguments.max_steps),
        say=say,
    )


def _metric(config: RunConfig, section: EvaluationSection) -> Metric:
    weights = [
        weight if section.metric == WEIGHTED_SUM else float(name == section.metric)
        for name, weight in zip(config.reward_names, config.reward_weights, strict=True)
    ]
    return Metric(np.array(weights, np.float32), section.threshold, section.pass_k)


def training_loop(
    components: RunComponents,
    connections: Connections,
    start: RunStart,
    callbacks: Sequence[TrainerCallback] = (),
    ranks: Ranks = ALONE,
) -> TrainingLoop:
    """The loop, with the weights that it starts from loaded.

    Args:
        callbacks: after that of the loop.
        ranks: that take the steps together.

    Raises:
        ConfigError: TRL or PEFT refused, or adapter or checkpoint do not fit.
        DeviceError: the device has no memory for the model, or failed.
    """
    config, arguments = components.config, components.arguments
    checkpoints = CheckpointWriter(
        config.checkpoints_dir, connections.pipeline, connections.waits, start.run_id, arguments.save_total_limit
    )
    if ranks.world > 1:
        folder = start.checkpoint.folder if start.checkpoint else None
        begin(ranks, len(components.prompts), components.shape.vocab_size, start.step, folder)
    trainer = _trainer(components, connections.feed, checkpoints, start, ranks, connections.pipeline.newest_plan)
    control = RunControl(
        trainer,
        connections,
        components.budget,
        _probe(components, trainer),
        RolloutLog(config, trainer.recipe, trainer.processing_class.decode, start.step),
        components.stop,
    )
    for callback in (control, *callbacks):
        trainer.add_callback(callback)
    return TrainingLoop(trainer, control, connections, start, Path(config.run_dir))


def _probe(components: RunComponents, trainer: SlipstreamTrainer) -> Probe:
    config, model = components.config, trainer.model
    tokens = probe_tokens(components.prompts, trainer.processing_class, config.seed)
    if config.model.quantization is None:
        return Probe(tokens, config.swap.probe_every, model, trainer.accelerator.autocast)
    folder, every = components.model_folder, config.swap.probe_every
    return unquantized_probe(tokens, every, config.model, folder, components.lora, model)


def _trainer(
    components: RunComponents,
    batches: Feed,
    checkpoints: CheckpointWriter,
    start: RunStart,
    ranks: Ranks,
    recorded: Recorded,
) -> SlipstreamTrainer:
    with loading("transformers, PEFT or TRL refused to build the trainer"):
        trainer = SlipstreamTrainer(
            components.config, components.arguments, components.lora, components.model_folder, batches, checkpoints.commit,
            ranks, recorded,
        )  # fmt: skip
    if components.initial_adapter is not None:
        trainer.start_from(components.initial_adapter, resumed=start.checkpoint is not None)
    if start.checkpoint is not None:
        folder = start.checkpoint.folder
        with loading(f"run_dir: {folder} does not fit model.path and lora"):
            trainer._load_from_checkpoint(str(folder))  # before the first policy is published
    return trainer


def retraining(
    components: RunComponents, recorded: RecordedRun, watch: Watch, *, resume: bool
) -> tuple[RunStart, Connections, Heartbeat, Counter[str]]:
    """Where it starts, what the loop is connected to, and what counts the groups."""
    config = components.config
    run_id = recorded.check(components.facts("?"))
    logs.bind(run=run_id)
    torch.set_num_threads(recorded.num_threads)
    run_dir, folder = Path(config.run_dir), config.checkpoints_dir
    start = RunStart(run_id, checkpoints.starting_point(run_dir, folder, has_groups=False, resume=resume))
    checkpoints.clear_leftovers(folder)
    counts: Counter[str] = Counter()
    report = components.report(counts, start.step, watch.registry)
    heartbeat = Heartbeat(watch.health, components.stop, ThreadErrors())
    waits = WaitPolicy(check=heartbeat.check, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s)
    feed = RecordedFeed(recorded, components.shape, heartbeat.check, start.step, counts)
    return start, Connections(feed, Pipeline(recorded.newest_plan), report, waits), heartbeat, counts
