"""How the parts of a producer are put together, in the order in which they need each other.

Guarantee: every function builds its part from parts that are there already, and nothing is set from outside afterwards.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from producer.environments.atropos import Atropos
from producer.environments.pool import EnvironmentPool
from producer.interfaces import Engine
from producer.link.link import Link
from producer.link.mailbox import Mailbox
from producer.loop_events import LoopEvents
from producer.policies.loading import PolicyLoader
from producer.policies.registry import AdapterRegistry
from producer.policies.swap_report import SwapReport
from producer.policies.verification import SwapProof
from producer.rollouts.admission import Admission
from producer.rollouts.agent_rollouts import AgentRollouts
from producer.rollouts.atropos_rollouts import AtroposRollouts
from producer.rollouts.chat import ChatFormat
from producer.rollouts.engine_access import BusyClock, EngineAccess, PolicyGate
from producer.rollouts.episodes import EpisodePlayer
from producer.rollouts.finish import Finish
from producer.rollouts.generation import Generation
from producer.rollouts.in_flight import InFlight
from producer.rollouts.plain_rollouts import PlainRollouts
from producer.rollouts.played_rollouts import PlayedRollouts
from producer.rollouts.prompts import PromptFormat, load_tokenizer
from producer.rollouts.source import RolloutSource
from producer.serving.generation import ServedEngine
from producer.serving.serving import Serving
from producer.startup import Base, Helpers, Launch
from producer.state import Identity, Situation
from producer.supervision import Supervision
from producer.watchdog import Watchdog
from protocol.config.sections.swap import TOLERANCES
from protocol.transport.zeromq_client import ZmqClient


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


def build_producer(base: Base, helpers: Helpers, engine: Engine) -> Producer:
    config, launch = base.config, base.launch
    tokenizer = load_tokenizer(engine.capabilities.tokenizer_folder, trust_remote_code=config.model.trust_remote_code)
    helpers.rewards.read_thinking(tokenizer, config.dataset.chat_template_kwargs)
    # One group more than fits, so that places freed by short completions are filled at once.
    max_groups = engine.capabilities.max_num_seqs // config.sampling.num_generations + 1
    admission = Admission(max_groups, config.sampling.num_generations, engine.current_load)
    clock = BusyClock()
    mailbox = Mailbox(build_channel(launch))
    registry = build_registry(base, engine, mailbox)
    gate = PolicyGate(registry)
    access = EngineAccess(
        gate, registry, admission, build_in_flight(base, engine, registry), clock, config.sampling.num_generations
    )
    atropos = build_atropos(base, engine)
    source = build_source(base, helpers, engine, tokenizer, access, gate, atropos)
    finish = Finish(config.reward_names, source.reward_names, helpers.rewards, base.counters, base.metrics)
    generation = Generation(source, finish, clock, base.counters, base.tasks.spawn, mailbox.answer)
    serving = (
        build_serving(
            base,
            helpers,
            ServedEngine(engine.openai_server(config), registry, engine.capabilities.max_num_seqs, clock.running),
            atropos,
        )
        if helpers.listener is not None
        else None
    )
    forget = [part.forget for part in (atropos, serving) if part is not None]
    events = LoopEvents(generation, gate, registry, forget, base.tasks.settle)
    link = build_link(base, engine, mailbox, events, generation, 2 * max_groups)
    rewards = helpers.rewards

    def look() -> Situation:
        version = base.counters.policy_version
        return Situation(generation.workload(), link.delivery(), version, rewards.num_workers, rewards.num_idle)

    base.metrics.watch(launch.name, base.counters, look, lambda: admission.limit)
    check_readiness(base, link)
    beat = partial(base.watch.health.beat, "event")
    watchdog = Watchdog(config.pipeline.stall_timeout_s)
    supervision = Supervision(engine, look, base.counters, base.timeline, watchdog, beat)
    return Producer(base, helpers, registry, generation, serving, link, supervision)


def build_channel(launch: Launch) -> ZmqClient:
    config = launch.config
    limit = config.transport.max_message_bytes
    return ZmqClient(launch.name, config.control_endpoint, config.blob_endpoint, limit, launch.keys)


def build_registry(base: Base, engine: Engine, mailbox: Mailbox) -> AdapterRegistry:
    config, evaluation = base.config, base.config.evaluation
    proof = SwapProof(config.swap.probe_tolerance or TOLERANCES[config.model.dtype])
    return AdapterRegistry(
        PolicyLoader(engine.weights, base.folder_for, proof),
        SwapReport(base.counters, base.metrics, base.timeline),
        mailbox.fetch,
        evaluation.hold_swap_s if evaluation and not engine.capabilities.holds_versions else None,
    )


def build_in_flight(base: Base, engine: Engine, registry: AdapterRegistry) -> InFlight:
    on_swap, holds_versions = base.config.swap.on_swap, engine.capabilities.holds_versions
    if on_swap == "continue" and not holds_versions:
        on_swap = "finish"  # it goes on by itself, without a cut
    return InFlight(engine, registry, base.counters, on_swap, keeps_weights=holds_versions)


def build_atropos(base: Base, engine: Engine) -> Atropos | None:
    if not base.config.environment.atropos:
        return None
    return Atropos(base.config, engine.capabilities.facts.max_model_len, lambda: base.counters.policy_version)


def build_source(
    base: Base,
    helpers: Helpers,
    engine: Engine,
    tokenizer: Any,
    access: EngineAccess,
    gate: PolicyGate,
    atropos: Atropos | None,
) -> RolloutSource:
    config, max_model_len = base.config, engine.capabilities.facts.max_model_len
    if atropos is not None:
        return AtroposRollouts(atropos, gate, config.reward_names)
    if helpers.environments is not None:
        player = build_player(base, helpers.environments, engine, tokenizer)
        own = set(config.reward_names) - set(config.rewards.names)
        return PlayedRollouts(access, player, tuple(own))
    prompts = PromptFormat(tokenizer, max_model_len, config.dataset.chat_template_kwargs)
    if helpers.agents is not None:
        return AgentRollouts(helpers.agents, gate, prompts)
    return PlainRollouts(access, prompts)


def build_player(base: Base, environments: EnvironmentPool, engine: Engine, tokenizer: Any) -> EpisodePlayer:
    """
    Args:
        environments: started.

    Raises:
        ConfigError: tools do not go with the model's chat template, or with the engine's parser.
    """
    config, tools, parser = base.config, environments.description.tools, None
    chat = ChatFormat(tokenizer, tools, config.dataset.chat_template_kwargs)
    chat.check()
    if tools:
        assert config.environment.tool_parser is not None
        parser = engine.tool_parser(config.environment.tool_parser, tokenizer, tools)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    max_model_len = engine.capabilities.facts.max_model_len
    return EpisodePlayer(config.environment, environments, chat, parser, decode, max_model_len, base.counters)


def build_serving(base: Base, helpers: Helpers, engine: ServedEngine, atropos: Atropos | None) -> Serving:
    registry, name = base.watch.registry, base.launch.name
    serving = Serving(base.config, name, helpers.client_keys, engine, registry, helpers.agents, atropos)
    base.watch.health.check_ready("serve", lambda: serving.problem)
    return serving


def build_link(
    base: Base, engine: Engine, mailbox: Mailbox, events: LoopEvents, generation: Generation, capacity: int
) -> Link:
    config, facts = base.config, engine.capabilities.facts
    evaluates = config.evaluation is not None
    return Link(
        mailbox,
        Identity(base.launch.name, facts, capacity, config.swap.mode, evaluates=evaluates),
        config.transport,
        config.control_endpoint,
        events,
        base.counters,
        generation.workload,
        partial(base.watch.health.beat, "link"),
    )


def check_readiness(base: Base, link: Link) -> None:
    health, counters = base.watch.health, base.counters
    health.check_ready("trainer", lambda: None if link.connected else "not connected")
    health.check_ready("swap", lambda: counters.refusal or None)
    health.check_ready("weights", lambda: None if counters.policy_version >= 0 else "none are loaded")
