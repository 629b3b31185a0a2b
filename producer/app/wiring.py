"""Puts the parts of a producer together, in the order in which they need each other.

Guarantee: every function builds its part from parts that are there already, and nothing is set from outside afterwards.
"""

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from producer.app.endpoint_contract import Endpoint
from producer.app.gpu_turns import GpuTurns
from producer.app.rollout_sources import build_source
from producer.app.timeline import Timeline, timeline_path
from producer.app.watchdog import Supervision, Watchdog
from producer.engine_contract import UNTOLD, Engine, EngineLoad, engine_plugin, most_groups
from producer.engine_gate import EngineGate
from producer.environments.agent_program import AgentProgram
from producer.environments.contract import Environments
from producer.environments.pool import environments_of
from producer.link.events import (
    EvaluationNoted,
    LeaseAbandoned,
    LinkEnded,
    LinkEvent,
    OutboxFull,
    PolicyArrived,
    PolicyFetched,
    PolicyRefused,
    RunBegan,
    SessionBegan,
    TurnNoted,
)
from producer.link.policy_source import PolicySource, TrainerSource
from producer.link.session import Link, Mailbox, TakeAgain
from producer.metrics import Counters, ProducerMetrics, Situation, Workload
from producer.policies.loader import PolicyLoader
from producer.policies.probe import SwapProof
from producer.policies.registry import AdapterRegistry, SwapReport
from producer.rewards.messages import Failure
from producer.rewards.pool import RewardPool
from producer.rollouts.admission import Admission
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.group import GroupBuilder, Teachers
from producer.rollouts.in_flight import InFlight
from producer.rollouts.leases import Generation
from producer.rollouts.prompts import load_tokenizer
from producer.rollouts.single_turn import PlainRollouts
from protocol.channel.client import ZmqClient
from protocol.channel.keys import ProducerKeys, process_name, producer_keys
from protocol.config.functions import installed_plugin, load_plugin
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, StalledError
from protocol.exposition import Watch, reachable
from protocol.gpu.nvml import free_bytes, gpu_ids
from protocol.gpu.reservation import GpuReservation, reserve_gpu
from protocol.runtime import logs
from protocol.runtime.processes import gc_disabled
from protocol.runtime.scratch import SharedMemory, scratch_folder, shared_memory
from protocol.runtime.stacks import log_stacks
from protocol.wire import adapter_blob, weight_patch
from protocol.wire.messages import Hello, Lease, PolicyInfo

LEASES = 6
"""Times the groups that fill the engine whole: with long tails it runs the rest of five times as many, and others wait or are
scored."""


class Tasks:
    """Belongs to the running loop."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task whose exception ends the daemon."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._finish)
        return task

    def settle(self, error: BaseException | None) -> None:
        """The daemon is to end, with this error or because its work is done."""
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
            self.outcome.exception()  # otherwise asyncio logs that it was never retrieved
        else:
            self.outcome.set_result(None)

    async def cancel(self, limit_s: float) -> None:
        """End all tasks. One that hangs is left alone after this time."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=limit_s)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.settle(error)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """Options and identity of the daemon."""

    config: RunConfig
    gpus: list[int]
    name: str
    keys: ProducerKeys | None
    bundle: str = ""  # digest of the one that the configuration is from, if the trainer gave it

    @classmethod
    def of(cls, config: RunConfig, gpus: list[int], bundle: str = "") -> "Launch":
        transport = config.transport
        keys = producer_keys(Path(transport.keys), transport.identity) if transport.keys else None
        return cls(config, gpus, process_name(keys), keys, bundle)


@dataclass(frozen=True)
class Base:
    """Parts that any other part may use."""

    launch: Launch
    config: RunConfig
    watch: Watch
    counters: Counters
    metrics: ProducerMetrics
    timeline: Timeline
    tasks: Tasks
    folder: Path
    memory: SharedMemory
    sources: PolicySource
    seat: GpuReservation

    def folder_for(self, num_bytes: int) -> Path:
        """Return the folder in which an adapter is unpacked: in memory, if there is room."""
        return self.memory.folder if self.memory.folder is not None and self.memory.has_room(num_bytes) else self.folder


def build_base(launch: Launch, watch: Watch, stack: AsyncExitStack) -> Base:
    config = launch.config
    if launch.bundle and config.pipeline.gpu == "shared":
        raise ConfigError(
            "pipeline.gpu: shared cannot be set with --connect: what the trainer takes of the GPU follows from its whole file; "
            "start the producer on its GPU with --config"
        )
    seat = stack.enter_context(reserve_gpu(config, launch.gpus, "producer"))
    timeline = Timeline(timeline_path(config.run_dir, launch.name))
    stack.callback(timeline.flush)
    names = [teacher.name for teacher in config.teachers]
    metrics = ProducerMetrics(watch.registry, config.rewards.names, get_args(Failure), names)
    folder, memory = stack.enter_context(scratch_folder()), stack.enter_context(shared_memory())
    sources = build_sources(launch, stack)
    return Base(launch, config, watch, Counters(), metrics, timeline, Tasks(), folder, memory, sources, seat)


def build_sources(launch: Launch, stack: AsyncExitStack) -> PolicySource:
    config = launch.config
    opened = installed_plugin("slipstream.policy_sources", "shared")
    if opened is None:
        return TrainerSource(config.transport)
    source: PolicySource = stack.enter_context(opened(config, launch.name, launch.keys.secret if launch.keys else None))
    return source


@dataclass(frozen=True)
class Helpers:
    """Parts that work beside the engine. `programs` play for agents. Environments have their names, that of the section
    `environment` an empty one."""

    rewards: RewardPool
    environments: dict[str, Environments]
    endpoint: Endpoint | None
    programs: dict[str, AgentProgram]
    teachers: Teachers | None

    async def start(self) -> None:
        await self.rewards.start()
        for pool in self.environments.values():
            await pool.start()
        for program in self.programs.values():
            await program.start()


def build_helpers(base: Base, stack: AsyncExitStack) -> Helpers:
    config = base.config
    rewards = RewardPool(config.computed_rewards, base.metrics)
    stack.push_async_callback(rewards.close)
    endpoint = build_endpoint(base, stack)
    rewards_turns = config.rewards.credit != "outcome"
    environments = {
        name: environments_of(each, rewards_turns=rewards_turns)
        for name, each in config.by_environment.items()
        if each.factory
    }
    programs = dict[str, AgentProgram]()
    for name, section in config.by_environment.items():
        if section.is_played_outside and endpoint is not None:
            gone = partial(endpoint.fail_taken, environment=name)
            programs[name] = AgentProgram(section, endpoint.url, endpoint.key, gone, name)
    parts: dict[str, Environments | AgentProgram] = {**environments, **programs}
    for name, part in parts.items():
        stack.push_async_callback(part.close)
        base.watch.health.check_ready(config.by_environment[name].key, part.problem)
    if programs:
        base.metrics.watch_agent_program(lambda: sum(program.restarts for program in programs.values()))
    teachers = build_teachers(base, stack)
    return Helpers(rewards, environments, endpoint, programs, teachers)


def build_endpoint(base: Base, stack: AsyncExitStack) -> Endpoint | None:
    if not base.config.serve.enabled:
        return None
    opened = load_plugin("slipstream.endpoints", "openai", "serve.enabled")
    version = partial(getattr, base.counters, "policy_version")
    endpoint: Endpoint = stack.enter_context(
        opened(base.config, base.launch.gpus, base.launch.name, base.watch.registry, version)
    )
    base.watch.health.check_ready("serve", partial(getattr, endpoint, "problem"))
    return endpoint


def build_teachers(base: Base, stack: AsyncExitStack) -> Teachers | None:
    if not base.config.teachers:
        return None
    teachers: Teachers = load_plugin("slipstream.teachers", "vllm_server", "teachers")(base.config, base.metrics)
    stack.push_async_callback(teachers.close)
    return teachers


async def start_engine(base: Base, stack: AsyncExitStack) -> Engine:
    """Raise StalledError if it does not answer."""
    started, limit_s = time.monotonic(), base.config.pipeline.stall_timeout_s
    engine = await _build_engine(base, stack)
    try:
        async with asyncio.timeout(limit_s):
            await engine.warm_up()
    except TimeoutError as error:
        log_stacks(f"no answer of the engine for {limit_s:g} s")
        raise StalledError(
            f"the engine did not answer its first request within pipeline.stall_timeout_s={limit_s:g} seconds"
            + (f": {outage}" if (outage := engine.outage()) else "")
        ) from error
    gc.collect()
    gc.freeze()  # what libraries have made stays; searching all of it again and again is a sixth of this process's work
    engine_s = time.monotonic() - started
    logger.info("engine ready after %.0f s", engine_s)
    base.timeline.record("start", name=base.launch.name, engine_start_s=round(engine_s, 3))
    return engine


async def _build_engine(base: Base, stack: AsyncExitStack) -> Engine:
    if (plugin := engine_plugin(base.config)) is not None:
        return await stack.enter_async_context(plugin.open(base.config))
    logger.info("loading the engine for %s ...", base.config.model.path)
    with gc_disabled():
        from producer.engine.engine import VllmEngine  # vLLM takes seconds to import

    logs.adopt_libraries()
    with base.seat.exclusive_startup(base.config.pipeline.stall_timeout_s):
        engine = VllmEngine(base.seat.with_share(base.config), len(base.launch.gpus))
        stack.callback(engine.shutdown)
    return engine


@dataclass(frozen=True)
class Producer:
    """The parts whose life the daemon leads."""

    base: Base
    helpers: Helpers
    registry: AdapterRegistry
    generation: Generation
    serve: Callable[[], Coroutine[Any, Any, None]] | None  # the endpoint
    link: Link
    supervision: Supervision
    gpu_turns: GpuTurns | None
    access: EngineAccess
    events: "asyncio.Queue[LinkEvent]"

    async def take_events(self) -> None:
        """Act on what the link tells, event after event, until cancelled."""
        while True:
            self._take(await self.events.get())

    def _take(self, event: LinkEvent) -> None:
        match event:
            case RunBegan(policy, plan):
                self.helpers.rewards.begin(plan)
                self.generation.abandon_all()
                self._start_session(policy)
            case SessionBegan(policy, plan):
                self.helpers.rewards.begin(plan)
                self._start_session(policy)
            case Lease():
                self.generation.start(event)
            case LeaseAbandoned(lease_id):
                self.generation.abandon(lease_id)
            case PolicyArrived(downloaded):
                self.registry.offer(downloaded)
            case PolicyRefused(policy, reason):
                self.registry.refuse_for_now(policy, reason)
            case PolicyFetched(policy, fetched):
                self.registry.on_fetched(policy, fetched)
            case EvaluationNoted(evaluated):
                self.registry.note_evaluation(evaluated)
            case TurnNoted(turn):
                if self.gpu_turns is not None:
                    self.gpu_turns.note(turn)
            case OutboxFull(is_full):
                self.access.pause(is_full)
            case LinkEnded(error):
                self.base.tasks.settle(error)

    def _start_session(self, policy: PolicyInfo) -> None:
        """Versions may mean other weights to another process of the trainer, so every part that keeps any forgets them."""
        self.generation.hand_back_above(policy.version)
        self.registry.start_session(policy)
        if self.helpers.endpoint is not None:
            self.helpers.endpoint.forget()


async def open_tokenizer(base: Base, helpers: Helpers, engine: Engine) -> Any:
    """Return the tokenizer, which rewards and teachers have got. Raises ConfigError if a teacher has another."""
    config = base.config
    tokenizer = load_tokenizer(
        engine.capabilities.tokenizer_folder,
        trust_remote_code=config.model.trust_remote_code,
        without_torch=config.engine_server is not None,
    )
    helpers.rewards.read_with(tokenizer, config.dataset.chat_template_kwargs)
    if helpers.endpoint is not None:
        helpers.endpoint.read_with(tokenizer)
    if helpers.teachers is not None:
        await helpers.teachers.read_with(tokenizer)
    return tokenizer


def build_producer(base: Base, helpers: Helpers, engine: Engine, tokenizer: Any) -> Producer:
    config, counters, health, name = base.config, base.counters, base.watch.health, base.launch.name
    can, rewards = engine.capabilities, helpers.rewards
    limit = config.transport.max_message_bytes
    mailbox = Mailbox(ZmqClient(name, config.control_endpoint, config.blob_endpoint, limit, base.launch.keys))
    gate = EngineGate()
    max_groups = most_groups(can.max_num_seqs, config.sampling.num_generations)
    admission = build_admission(engine, gate, max_groups, config.sampling.num_generations)
    registry = build_registry(base, engine, mailbox, gate)
    gpu_turns = build_gpu_turns(base, engine, gate, registry, mailbox.wake)
    in_flight = InFlight(engine, registry, counters, config.on_swap, gate=gate)
    access = EngineAccess(registry, admission, in_flight)
    endpoint = helpers.endpoint
    source = endpoint.source(access, can.facts.max_model_len) if endpoint is not None else None
    source = source or build_source(config, helpers.environments, endpoint, engine, tokenizer, access, counters)
    if helpers.teachers is not None and isinstance(source, PlainRollouts):
        helpers.teachers.use_engine(source.prompts, in_flight.score)
    builder = GroupBuilder(
        config.reward_names, source.reward_names, rewards, counters, base.metrics, teachers=helpers.teachers,
        is_given=config.rewards.credit == "given",
    )  # fmt: skip
    generation = Generation(source, builder, in_flight.busy, counters, base.tasks.spawn, mailbox.put)
    serve = None if endpoint is None else endpoint.serving(engine, registry, in_flight.busy.running, gate)
    events: asyncio.Queue[LinkEvent] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emit(event: LinkEvent) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    def workload() -> Workload:
        return replace(generation.workload(), takes_leases=engine.outage() is None)

    hello = build_hello(base, engine, LEASES * max_groups)
    beat = partial(health.beat, "link")
    link = Link(mailbox, hello, config.transport, base.sources, emit, counters, workload, beat)

    def read_status() -> Situation:
        work, delivery, load = workload(), link.delivery(), engine.current_load()
        steps = UNTOLD if load is None else load.steps
        return Situation(counters, work, delivery, admission.limit, rewards.num_workers, rewards.num_idle, steps)

    base.metrics.watch(name, read_status, base.sources)
    health.check_ready("trainer", lambda: None if link.connected else "not connected")
    health.check_ready("swap", lambda: counters.refusal or None)
    health.check_ready("engine", engine.outage)
    health.check_ready("weights", lambda: None if counters.policy_version >= 0 else "none are loaded")
    watchdog = Watchdog(config.pipeline.stall_timeout_s)
    on_tick = partial(health.beat, "event")
    supervision = Supervision(engine, read_status, base.timeline, watchdog, on_tick, generation)
    return Producer(base, helpers, registry, generation, serve, link, supervision, gpu_turns, access, events)


def build_admission(engine: Engine, gate: EngineGate, max_groups: int, group_size: int) -> Admission:
    """Make the way into the engine. Its load counts while requests are there: not those that were cut for the trainer's turn on
    the GPU, or that wait for a server."""

    def load() -> EngineLoad | None:
        return engine.current_load() if gate.is_open and engine.outage() is None else None

    admission = Admission(max_groups, group_size, load)
    engine.watch_load(admission.note_load)
    return admission


def build_hello(base: Base, engine: Engine, capacity: int) -> Hello:
    """Make the message that introduces this producer to the trainer. It may have `capacity` leases."""
    config, host = base.config, socket.gethostname()[:128]
    return Hello(
        base.launch.name,
        engine.capabilities.facts,
        capacity,
        swap_mode=config.weights,
        evaluates=config.evaluation is not None,
        host=host,
        region=config.transport.region or host,
        bundle=base.launch.bundle,
        metrics=reachable(base.watch.address, config.control_endpoint),
        gpus=tuple(gpu_ids(base.launch.gpus)),
        takes_turns=config.pipeline.gpu == "turns",
    )


def build_gpu_turns(
    base: Base, engine: Engine, gate: EngineGate, registry: AdapterRegistry, notify_link: Callable[[], None]
) -> GpuTurns | None:
    """Build the turns on the GPU; None where they do not apply. Raises ConfigError where the engine cannot leave the GPU."""
    pipeline = base.config.pipeline
    if pipeline.gpu != "turns":
        return None
    if not engine.capabilities.can_sleep:
        raise ConfigError(
            "pipeline.gpu: turns needs an engine that can sleep, and this one cannot; set pipeline.gpu: own"
        )
    return GpuTurns(
        engine,
        gate,
        registry.unchanged,
        base.counters,
        notify_link,
        silence_s=base.config.transport.heartbeat_timeout_s + pipeline.gpu_handover_s,
        stall_timeout_s=pipeline.stall_timeout_s,
        free_bytes=partial(free_bytes, base.launch.gpus),
        try_moving=base.seat.try_moving,
    )


def build_registry(base: Base, engine: Engine, mailbox: Mailbox, gate: EngineGate) -> AdapterRegistry:
    config, evaluation = base.config, base.config.evaluation
    proof = SwapProof(config.probe_tolerance, config.probe_slack)
    unpack = weight_patch.unpack if config.weights == "full" else adapter_blob.unpack
    return AdapterRegistry(
        PolicyLoader(engine.weights, base.folder_for, proof, gate, unpack),
        SwapReport(base.counters, base.metrics, base.timeline.record),
        mailbox.put,
        lambda policy: mailbox.put(TakeAgain(policy)),
        evaluation.hold_swap_s if evaluation and not engine.capabilities.holds_versions else None,
        config.pipeline.max_staleness,
        config.swap.max_refused,
    )
