"""A trainer with producers: everything but the model, in the order in which the parts need each other. Wiring only."""

import dataclasses
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from consumer.app.feed import BatchFeed, RecordedFeed, RecordedRun
from consumer.app.live_run import LiveRun
from consumer.app.run import Liveness, Run
from consumer.app.setup import RunStart, Setup
from consumer.evaluate.control import EvaluationControl
from consumer.evaluate.evaluation import Metric
from consumer.evaluate.leases import EvaluationLeases, EvaluationRules
from consumer.evaluate.results import EvaluationQueue, EvaluationResults
from consumer.learn import checkpoints as checkpoints
from consumer.learn.checkpoint_settings import check_settings
from consumer.learn.run_facts import comparable, credits_of, dataset_change
from consumer.link.commit_queue import RolloutStorage
from consumer.link.dispatcher import LeaseDispatcher, PromptCheck
from consumer.link.fleet import SessionTerms
from consumer.link.gpu_turns import GpuTurns
from consumer.link.intake import Intake
from consumer.link.offered_bundle import offered_bundle
from consumer.link.policy_store import PolicyStore
from consumer.link.refusals import RefusalWatch
from consumer.prompts.completion_limit import CompletionLimit
from consumer.prompts.dataset import PromptDataset
from consumer.prompts.tokenizer import load_tokenizer
from consumer.report.metrics import commit_seconds, watch_evaluation, watch_trainer, watch_turns
from consumer.waiting import ThreadErrors, WaitPolicy
from protocol.channel.channel import ServerChannel
from protocol.channel.keys import trainer_keys
from protocol.channel.server import ZmqServer
from protocol.config.data import WEIGHTED_SUM, EvaluationSection, SamplingSection
from protocol.config.learning import PipelineSection
from protocol.config.loader import write_resolved
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.exposition import Watch
from protocol.gpu.nvml import gpu_facts
from protocol.gpu.reservation import log_waiting, tenancy
from protocol.runtime import logs
from protocol.runtime.logs import Throttle
from protocol.runtime.scratch import shared_memory
from protocol.wire import adapter_blob, weight_patch
from protocol.wire.handshake import TrainerNeeds
from protocol.wire.messages import Sampling, prompt_token_ids
from replay.batch_rule import BatchRule
from replay.batch_selection import BatchSelector
from replay.buffer import RolloutBuffer
from replay.curriculum import Curriculum
from replay.journal.retention import DiskGuard
from replay.journal.writer import Journal
from replay.prompt_draws import PromptDraws
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import FailureClass, RetryBudget
from replay.replay_table import ReplayTable
from replay.rerolls import RerollRules
from replay.rewards import SignalWatch
from replay.shares import EnvironmentShares
from replay.signal_chances import SignalChances
from replay.sources import Sources
from replay.watches import FailureWatch, RewardWatch

logger = logging.getLogger(__name__)


def live_run(setup: Setup, watch: Watch, opened: ExitStack, gpus: Sequence[int], *, resume: bool) -> LiveRun:
    """
    Args:
        opened: closes what is opened here.
        gpus: of the trainer, by their indexes.

    Raises:
        ConfigError: run_dir holds another run, or one that was not named by --resume.
    """
    config, settings = setup.config, setup.config.pipeline
    journal = opened.enter_context(closing(Journal(config.journal_file, commit_seconds(watch.registry).observe)))
    before = journal.facts()
    start = _start(setup, journal, before, resume)
    facts = setup.facts(start.run_id)
    same_shape = _comparable(start, journal, before, facts)
    journal.note_facts(facts | {"credits": credits_of(before, facts, start.step)})
    write_resolved(config)

    session = secrets.token_hex(4)  # of this process; the run may outlive it
    buffer = rollout_buffer(setup, journal, session)
    buffer.restore(start.state or None, step=start.step, shape=setup.shape, comparable=same_shape)
    if start.checkpoint is not None:
        logger.info("resuming at step %d from %s", start.step, start.checkpoint.folder)
    storage = RolloutStorage(buffer, journal, DiskGuard(Path(config.run_dir), config.replay.max_disk_used))
    channel = _channel(config)
    store = PolicyStore(config.max_loras, opened.enter_context(shared_memory()))
    report = setup.report(buffer.totals, start.step, watch.registry)

    warn = Throttle(logger)
    prompts, sampling = setup.prompts, config.sampling.message
    evaluation = evaluation_of(
        setup, channel, store, session, start.step, report.say, lambda: frozenset(buffer.failures.skipped)
    )
    dispatcher = LeaseDispatcher(
        channel, buffer, prompts, storage.disk, sampling, settings.lease_timeout_s, warn,
        evaluations=evaluation.leases if evaluation else None, limit=CompletionLimit.of_run(config.sampling),
        prompt_check=_prompt_check(setup),
    )  # fmt: skip
    errors = ThreadErrors()
    heartbeat = Liveness(watch.health, setup.stop, errors)
    resumed = start.checkpoint is not None or bool(before)
    turns = _turns(setup, gpus, opened, resumed=resumed) if settings.gpu == "turns" else None
    refusals = RefusalWatch(config.swap.max_refused, _settle_s(config), resumed)
    terms = _terms(setup, facts, session, turns, refusals)
    intake = Intake(channel, storage, dispatcher, store, terms, errors, lambda: run.beat())
    waits = WaitPolicy(check=heartbeat.check, say=report.say, stall_timeout_s=settings.stall_timeout_s)
    feed = BatchFeed(buffer, intake, waits, turns)
    run = LiveRun(
        setup, start, feed, waits, report, storage, intake, heartbeat, turns,
        recorded=journal.newest_plan, evaluation=evaluation, refusals=channel.refusals.counts,
    )  # fmt: skip
    opened.enter_context(closing(run))
    return run


def watch_live(run: LiveRun, watch: Watch) -> None:
    """Metrics and health checks. Only after the first policy was published."""
    registry, health = watch.registry, watch.health
    _, journal, disk = run.storage
    watch_trainer(registry, run.start.run_id, run.storage, run.intake, run.refusals, run.feed.waiting_s)
    watch.targets.add(run.intake.fleet.targets)
    watch_evaluation(registry, run.evaluation)
    watch_turns(registry, run.turns)
    health.check_alive("disk", disk.complaint)
    health.check_ready("journal", journal.complaint)
    health.check_ready("producers", lambda: None if run.intake.fleet.sessions else "none is connected")


def _prompt_check(setup: Setup) -> PromptCheck | None:
    """Return none where environments or agents make the tokens of prompts."""
    config = setup.config
    if config.by_environment or config.posted_rewards:
        return None
    tokenizer = load_tokenizer(setup.model_folder, trust_remote_code=config.model.trust_remote_code)
    return PromptCheck(lambda prompt: prompt_token_ids(tokenizer, prompt, config.dataset.chat_template_kwargs))


def _start(setup: Setup, journal: Journal, before: dict[str, str], resume: bool) -> RunStart:
    config = setup.config
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
    if found is not None:
        check_settings(found, setup.settings)
    checkpoints.clear_leftovers(config.checkpoints_dir)
    logs.bind(run=run_id)
    return RunStart(run_id, found)


def _turns(setup: Setup, gpus: Sequence[int], opened: ExitStack, *, resumed: bool) -> GpuTurns:
    config, pipeline = setup.config, setup.config.pipeline
    settle_s = _settle_s(config) if resumed else 0.0
    gpu = gpu_facts(gpus[0]) if gpus else None
    if gpu is None:
        return GpuTurns(gpus, pipeline.gpu_handover_s, settle_s)
    own = opened.enter_context(tenancy(gpu.uuid, "trainer", config.run_dir))
    stay = partial(own.alone, pipeline.stall_timeout_s, say=log_waiting)
    return GpuTurns(gpus, pipeline.gpu_handover_s, settle_s, stay)


def _settle_s(config: RunConfig) -> float:
    """Return how long producers take to come to another trainer process: one that has lost its trainer greets the next one within
    `heartbeat_timeout_s`, and again within a moment."""
    return 1.0 + 1.25 * config.transport.heartbeat_timeout_s


def _comparable(start: RunStart, journal: Journal, before: dict[str, str], facts: dict[str, str]) -> bool:
    """Return whether the groups in the journal can be trained with this configuration."""
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


def _terms(
    setup: Setup, facts: dict[str, str], session: str, turns: GpuTurns | None, refusals: RefusalWatch
) -> SessionTerms:
    config, host = setup.config, socket.gethostname()[:128]
    needs = TrainerNeeds(
        base_model_digest=facts["base_model_digest"],
        tokenizer_digest=facts["tokenizer_digest"],
        dtype=config.model.dtype,
        lora_rank=config.max_lora_rank and config.lora_section["r"],
        max_loras=config.training_loras,
        max_completion_length=config.sampling.max_completion_length,
        reward_names=config.reward_names,
        engine_quantization=str(config.engine.get("quantization") or ""),
        quantization=config.model.quantization or "",
        patches=config.weights == "full",
        max_model_lens=setup.max_model_lens,
    )
    return SessionTerms(
        needs,
        setup.shape,
        facts["run_id"],
        session,
        config.pipeline.lease_timeout_s,
        config.transport.heartbeat_interval_s,
        config.transport.heartbeat_timeout_s,
        host,
        config.transport.region or host,
        offered_bundle(config, Path.cwd()),
        turns,
        refusals,
        setup.plan,
    )


def rollout_buffer(setup: Setup, journal: Journal, session: str) -> RolloutBuffer:
    """An empty buffer.

    Args:
        session: unique per trainer process.
    """
    config = setup.config
    pipeline, reroll = config.pipeline, config.reroll
    draws = None
    section, levels = config.dataset.curriculum, [source.level for source in config.dataset.sources]
    curriculum = Curriculum(section, levels, setup.prompts.sources.number_of) if section else None
    chances = SignalChances(setup.prompts.sources.number_of) if config.dataset.sampling == "by_signal" else None
    if curriculum or chances:
        draws = PromptDraws(journal, chances, config.seed, curriculum)
    ledger = PromptLedger(
        len(setup.prompts),
        seed=config.seed,
        shuffle=config.dataset.shuffle,
        budgets=retry_budgets(pipeline),
        session=session,
        rerolls=reroll,
        draws=draws,
        environment_of=setup.prompts.environment_of if config.environments else (lambda _: ""),
    )
    shares, parts = None, dict[str, float]()
    if config.environments and isinstance(setup.prompts, PromptDataset):
        parts = setup.prompts.environment_parts()
        shares = EnvironmentShares(parts, setup.budget)
    size = pipeline.groups_per_step
    selector = BatchSelector(
        setup.budget,
        journal,
        BatchRule.sampled(size) if pipeline.fill == "sampled" else BatchRule.full(size),
        signal=setup.rewards.signal,
        replay=ReplayTable(config.replay, config.seed) if config.replay.mode == "signal" else None,
        max_replayed=min(int(config.replay.max_share * size), size - 1),
    )
    return RolloutBuffer(
        ledger,
        selector,
        journal,
        _reroll_rules(config, setup.prompts.sources),
        setup.rewards.mean_reward,
        FailureWatch(pipeline.max_failed_share, parts, config.may_skip),
        SignalWatch(config.guards.max_groups_without_signal),
        shares,
        sources=setup.prompts.sources,
        rewards=RewardWatch.of(config),
    )


def _reroll_rules(config: RunConfig, sources: Sources) -> RerollRules:
    names, reroll = config.reward_names, config.reroll
    column = names.index(reroll.reward) if reroll.reward else 0
    others = range(len(names)) if config.environments else ()
    judges = [names.index(source.judge) if source.judge else column for source in config.dataset.sources]
    return RerollRules(reroll, column, tuple(others), sources, tuple(judges))


def retry_budgets(pipeline: PipelineSection) -> dict[FailureClass, RetryBudget]:
    """Return how often a prompt is tried again, for training and for evaluations alike."""
    return {
        "data": RetryBudget(pipeline.max_data_attempts, pipeline.data_backoff_s),
        "infra": RetryBudget(pipeline.max_infra_attempts, pipeline.infra_backoff_s),
    }


def _held_out_sampling(sampling: SamplingSection, section: EvaluationSection) -> Sampling:
    """Return how answers to held-out prompts are sampled."""
    own = {"num_generations": section.num_completions, "temperature": section.temperature}
    return msgspec.structs.replace(sampling.message, **own, top_p=1.0, top_k=0, min_p=0.0)


def evaluation_of(
    setup: Setup,
    channel: ServerChannel,
    store: PolicyStore,
    session: str,
    first_step: int,
    say: Callable[..., None],
    skipped: Callable[[], frozenset[str]],
) -> EvaluationControl | None:
    """Wire the evaluations of a run; None for a run without.

    Args:
        session: unique per trainer process.
        first_step: steps taken before this process.
        skipped: returns the environments whose prompts are left out.
    """
    config, section = setup.config, setup.config.evaluation
    if section is None or setup.held_out is None:
        return None
    pipeline, run_dir = config.pipeline, Path(config.run_dir)
    results = EvaluationResults(
        run_dir,
        config.checkpoints_dir,
        section,
        first_step,
        pipeline.max_failed_share,
        weight_patch.unpack if config.weights == "full" else adapter_blob.unpack,
    )
    due = EvaluationQueue(run_dir)
    due.restore(first_step, results.versions)
    rules = EvaluationRules(
        num_prompts=min(len(setup.held_out), section.max_prompts or len(setup.held_out)),
        sampling=_held_out_sampling(config.sampling, section),
        metric=_metric(config, section),
        shape=dataclasses.replace(
            setup.shape, num_generations=section.num_completions, has_teacher=False, teacher_top_k=0
        ),
        budgets=retry_budgets(pipeline),
        limit=CompletionLimit.of_run(config.sampling),
        per_place=max(1, config.sampling.num_generations // section.num_completions),
        timeout_s=pipeline.lease_timeout_s,
        session=session,
    )
    return EvaluationControl(
        section,
        due,
        results,
        EvaluationLeases(store, channel, due, setup.held_out, rules, Throttle(logger), skipped=skipped),
        run_dir=run_dir,
        reward_names=config.reward_names,
        last_version=setup.budget.version_at(setup.arguments.max_steps),
        say=say,
        sources=setup.held_out.sources,
    )


def _metric(config: RunConfig, section: EvaluationSection) -> Metric:
    weights = [
        weight if section.metric == WEIGHTED_SUM else float(name == section.metric)
        for name, weight in zip(config.reward_names, config.reward_weights, strict=True)
    ]
    return Metric(np.array(weights, np.float32), section.threshold, section.pass_k)


def recorded_run(
    setup: Setup, recorded: RecordedRun, watch: Watch, *, resume: bool
) -> tuple[Run, Liveness, Counter[str]]:
    """A run that trains the batches of a journal again, and the counts of its groups."""
    config = setup.config
    run_id = recorded.check(setup.facts("?"))
    run_dir, folder = Path(config.run_dir), config.checkpoints_dir
    start = RunStart(run_id, checkpoints.starting_point(run_dir, folder, has_groups=False, resume=resume))
    if start.checkpoint is not None and start.checkpoint.run_id != run_id:
        raise ConfigError(
            f"run_dir: {start.checkpoint.folder} is of another run than that of --from-journal; choose another run_dir"
        )
    if start.checkpoint is not None:
        check_settings(start.checkpoint, setup.settings)
    logs.bind(run=run_id)
    torch.set_num_threads(recorded.num_threads)
    checkpoints.clear_leftovers(folder)
    write_resolved(config)
    counts: Counter[str] = Counter()
    report = setup.report(counts, start.step, watch.registry)
    heartbeat = Liveness(watch.health, setup.stop, ThreadErrors())
    waits = WaitPolicy(check=heartbeat.check, say=report.say, stall_timeout_s=config.pipeline.stall_timeout_s)
    feed = RecordedFeed(recorded, setup.shape, heartbeat.check, start.step, counts, setup.prompts.sources)
    return Run(setup, start, feed, waits, report, recorded=recorded.newest_plan), heartbeat, counts
