"""How the parts of a producer are put together, in the order in which they need each other.

Guarantee: every function builds its part from parts that are there already, and nothing is set from outside afterwards.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from producer.endpoint.generation import ServedEngine
from producer.endpoint.serving import Serving
from producer.engine_gate import EngineGate
from producer.environments.pool import EnvironmentPool
from producer.gpu_turns import GpuTurns
from producer.interfaces import Engine, LinkEvents
from producer.link.link import Link
from producer.link.mailbox import Mailbox, TakeAgain
from producer.plugins.atropos.atropos import Atropos
from producer.policies.loading import PolicyLoader
from producer.policies.registry import AdapterRegistry
from producer.policies.swap_report import SwapReport
from producer.policies.verification import SwapProof
from producer.rollouts.admission import Admission
from producer.rollouts.chat import ChatFormat
from producer.rollouts.engine_access import EngineAccess
from producer.rollouts.finish import Finish
from producer.rollouts.generation import Generation, RolloutSource
from producer.rollouts.in_flight import InFlight
from producer.rollouts.played_rollouts import PlayedRollouts
from producer.rollouts.prompts import PromptFormat, load_tokenizer
from producer.rollouts.sources import AgentRollouts, AtroposRollouts, PlainRollouts
from producer.startup import Base, Helpers
from producer.state import Situation, Workload
from producer.supervision import Supervision, Watchdog
from protocol.channel.client import ZmqClient
from protocol.config.operation import TOLERANCES
from protocol.errors import ConfigError
from protocol.exposition import reachable
from protocol.gpu.nvml import free_bytes, gpu_ids
from protocol.wire.messages import GpuTurn, Hello, PolicyInfo


@dataclass(frozen=True)
class Producer:
    """The parts whose life the daemon leads."""

    base: Base
    helpers: Helpers
    registry: AdapterRegistry
    generation: Generation
    serving: Serving | None
    link: Link
    supervision: Supervision
    gpu_turns: GpuTurns | None


def link_events(
    generation: Generation,
    access: EngineAccess,
    registry: AdapterRegistry,
    forget: Sequence[Callable[[], None]],
    ended: Callable[[BaseException | None], None],
    turn: Callable[[GpuTurn | None], None],
) -> LinkEvents:
    """Each is acted on by the loop's thread, in the order in which the link's thread told them. Versions may mean other weights
    when another trainer process begins a session, so whoever keeps any has to forget them."""
    loop = asyncio.get_running_loop()

    def on_loop(function: Callable[..., None]) -> Callable[..., object]:
        return partial(loop.call_soon_threadsafe, function)

    def start_session(policy: PolicyInfo) -> None:
        generation.hand_back_above(policy.version)
        registry.start_session(policy)
        for part in forget:
            part()

    def begin_run(policy: PolicyInfo) -> None:
        generation.abandon_all()
        start_session(policy)

    return LinkEvents(
        run_began=on_loop(begin_run),
        session_began=on_loop(start_session),
        leased=on_loop(generation.start),
        abandoned=on_loop(generation.abandon),
        policy_arrived=on_loop(registry.offer),
        policy_refused=on_loop(registry.refuse_for_now),
        fetched=on_loop(registry.on_fetched),
        evaluates=on_loop(registry.note_evaluation),
        turn=on_loop(turn),
        outbox_full=on_loop(access.pause),
        ended=on_loop(ended),
    )


def build_producer(base: Base, helpers: Helpers, engine: Engine) -> Producer:
    config, counters, health, name = base.config, base.counters, base.watch.health, base.launch.name
    can, rewards = engine.capabilities, helpers.rewards
    tokenizer = load_tokenizer(
        can.tokenizer_folder,
        trust_remote_code=config.model.trust_remote_code,
        without_torch=config.engine_server is not None,
    )
    rewards.read_thinking(tokenizer, config.dataset.chat_template_kwargs)
    # One group more than fits, so that places freed by short completions are filled at once.
    max_groups = can.max_num_seqs // config.sampling.num_generations + 1
    admission = Admission(max_groups, config.sampling.num_generations, engine.current_load)
    limit = config.transport.max_message_bytes
    mailbox = Mailbox(ZmqClient(name, config.control_endpoint, config.blob_endpoint, limit, base.launch.keys))
    gate = EngineGate()
    registry = build_registry(base, engine, mailbox, gate)
    gpu_turns = build_gpu_turns(base, engine, gate, registry, mailbox.wake)
    in_flight = InFlight(engine, registry, counters, config.swap.on_swap, gate=gate)
    access = EngineAccess(registry, admission, in_flight)
    atropos = None
    if config.environment.atropos:
        atropos = Atropos(config, can.facts.max_model_len, lambda: counters.policy_version)
    source = build_source(base, helpers, engine, tokenizer, access, atropos)
    finish = Finish(config.reward_names, source.reward_names, rewards, counters, base.metrics)
    generation = Generation(source, finish, in_flight.busy, counters, base.tasks.spawn, mailbox.put)
    serving = None
    if helpers.listener is not None:
        served = ServedEngine(engine.openai_server(config), registry, can.max_num_seqs, in_flight.busy.running, gate)
        serving = Serving(config, name, helpers.client_keys, served, base.watch.registry, helpers.agents, atropos)
        health.check_ready("serve", partial(getattr, serving, "problem"))
    forget = [part.forget for part in (atropos, serving.versions if serving else None) if part is not None]
    note_turn = gpu_turns.note if gpu_turns else lambda turn: None
    events = link_events(generation, access, registry, forget, base.tasks.settle, note_turn)

    def workload() -> Workload:
        return replace(generation.workload(), takes_leases=engine.outage() is None)

    hello = build_hello(base, engine, 2 * max_groups)
    beat = partial(health.beat, "link")
    link = Link(mailbox, hello, config.transport, base.neighbours, events, counters, workload, beat)

    def look() -> Situation:
        work, delivery = workload(), link.delivery()
        return Situation(counters, work, delivery, admission.limit, rewards.num_workers, rewards.num_idle)

    base.metrics.watch(name, look, base.neighbours)
    health.check_ready("trainer", lambda: None if link.connected else "not connected")
    health.check_ready("swap", lambda: counters.refusal or None)
    health.check_ready("engine", engine.outage)
    health.check_ready("weights", lambda: None if counters.policy_version >= 0 else "none are loaded")
    watchdog = Watchdog(config.pipeline.stall_timeout_s)
    beat_event = partial(health.beat, "event")
    supervision = Supervision(engine, look, base.timeline, watchdog, beat_event, generation.hand_back_ungenerated)
    return Producer(base, helpers, registry, generation, serving, link, supervision, gpu_turns)


def build_hello(base: Base, engine: Engine, capacity: int) -> Hello:
    """What the trainer is told of this producer, which may have so many leases."""
    config, host = base.config, socket.gethostname()[:128]
    return Hello(
        base.launch.name,
        engine.capabilities.facts,
        capacity,
        swap_mode=config.swap.mode,
        evaluates=config.evaluation is not None,
        host=host,
        region=config.transport.region or host,
        bundle=base.launch.bundle,
        metrics=reachable(base.watch.address, config.control_endpoint),
        gpus=tuple(gpu_ids(base.launch.gpus)),
        takes_turns=config.pipeline.gpu == "turns",
    )


def build_gpu_turns(
    base: Base, engine: Engine, gate: EngineGate, registry: AdapterRegistry, told: Callable[[], None]
) -> GpuTurns | None:
    """None: the GPU is the producer's alone. Raises ConfigError where the engine cannot leave it."""
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
        told,
        silence_s=base.config.transport.heartbeat_timeout_s + pipeline.gpu_handover_s,
        stall_timeout_s=pipeline.stall_timeout_s,
        free_bytes=partial(free_bytes, base.launch.gpus),
        try_moving=base.seat.try_moving,
    )


def build_registry(base: Base, engine: Engine, mailbox: Mailbox, gate: EngineGate) -> AdapterRegistry:
    config, evaluation = base.config, base.config.evaluation
    proof = SwapProof(config.swap.probe_tolerance or TOLERANCES[config.model.dtype])
    return AdapterRegistry(
        PolicyLoader(engine.weights, base.folder_for, proof, gate),
        SwapReport(base.counters, base.metrics, base.timeline),
        mailbox.put,
        lambda policy: mailbox.put(TakeAgain(policy)),
        evaluation.hold_swap_s if evaluation and not engine.capabilities.holds_versions else None,
        config.pipeline.max_staleness,
    )


def build_source(
    base: Base,
    helpers: Helpers,
    engine: Engine,
    tokenizer: Any,
    access: EngineAccess,
    atropos: Atropos | None,
) -> RolloutSource:
    config, max_model_len = base.config, engine.capabilities.facts.max_model_len
    if atropos is not None:
        return AtroposRollouts(atropos, access, config.reward_names)
    if helpers.environments is not None:
        chat = build_chat(base, helpers.environments, engine, tokenizer)
        own = set(config.reward_names) - set(config.rewards.names)
        return PlayedRollouts(access, config.environment, helpers.environments, chat, base.counters, tuple(own))
    placeholders = engine.capabilities.placeholders
    prompts = PromptFormat(tokenizer, max_model_len, config.dataset.chat_template_kwargs, placeholders=placeholders)
    if helpers.agents is not None:
        return AgentRollouts(helpers.agents, access, prompts)
    return PlainRollouts(access, prompts)


def build_chat(base: Base, environments: EnvironmentPool, engine: Engine, tokenizer: Any) -> ChatFormat:
    """After the pool was started. Raises ConfigError where tools do not go with the chat template or with the engine's
    parser."""
    config, tools, parser = base.config, environments.tools, None
    if tools:
        assert config.environment.tool_parser is not None
        parser = engine.tool_parser(config.environment.tool_parser, tokenizer, tools)
    max_model_len = engine.capabilities.facts.max_model_len
    chat = ChatFormat(tokenizer, max_model_len, config.dataset.chat_template_kwargs, tools, parser)
    chat.check()
    return chat
