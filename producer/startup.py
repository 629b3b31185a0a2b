"""What a producer is made of before it generates: itself, what works beside the engine, and the engine.

Guarantee: what is started first are reward functions and environments, because mistakes are cheaper there than in the engine.
What was started is closed by the stack, in the reverse order.
"""

import asyncio
import logging
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from producer.endpoint.agents import Agents
from producer.endpoint.serving import base_url, listening, read_keys
from producer.environments.agent_program import AgentProgram
from producer.environments.pool import EnvironmentPool
from producer.interfaces import Engine, engine_plugin
from producer.metrics import ProducerMetrics
from producer.relays.host_cache import host_cache
from producer.relays.neighbours import Neighbours
from producer.relays.place import relay_place
from producer.relays.relay import Relay
from producer.rewards.pool import RewardPool
from producer.state import Counters
from producer.tasks import Tasks
from producer.timeline import Timeline
from protocol.channel.keys import ProducerKeys, process_name, producer_keys
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, StalledError
from protocol.exposition import Watch
from protocol.gpu.reservation import Seat, seated
from protocol.runtime import logs
from protocol.runtime.processes import uncollected
from protocol.runtime.scratch import SharedMemory, scratch_folder, shared_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What the daemon was started with, and who it is."""

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
    """What every other part may use."""

    launch: Launch
    config: RunConfig
    watch: Watch
    counters: Counters
    metrics: ProducerMetrics
    timeline: Timeline
    tasks: Tasks
    folder: Path
    memory: SharedMemory
    neighbours: Neighbours
    seat: Seat

    def folder_for(self, num_bytes: int) -> Path:
        """Where an adapter is unpacked: in memory, if there is room."""
        return self.memory.folder if self.memory.folder is not None and self.memory.has_room(num_bytes) else self.folder


def build_base(launch: Launch, watch: Watch, stack: AsyncExitStack) -> Base:
    config = launch.config
    if launch.bundle and config.pipeline.gpu == "shared":
        raise ConfigError(
            "pipeline.gpu: shared cannot be set with --connect: what the trainer takes of the GPU follows from its whole file; "
            "start the producer on its GPU with --config"
        )
    seat = stack.enter_context(seated(config, launch.gpus, "producer"))
    timeline = Timeline(Path(config.run_dir) / f"producer-{launch.name}.jsonl")
    stack.callback(timeline.flush)
    metrics = ProducerMetrics(watch.registry, config.rewards.names)
    folder, memory = stack.enter_context(scratch_folder()), stack.enter_context(shared_memory())
    neighbours = build_neighbours(launch, stack)
    return Base(launch, config, watch, Counters(), metrics, timeline, Tasks(), folder, memory, neighbours, seat)


def build_neighbours(launch: Launch, stack: AsyncExitStack) -> Neighbours:
    config, transport = launch.config, launch.config.transport
    secret = launch.keys.secret if launch.keys else None
    cache = stack.enter_context(host_cache(config.control_endpoint))
    relay = None
    if transport.relay_port is not None:
        place = partial(relay_place, transport, config.control_endpoint)
        relay = Relay(cache, place, transport.max_message_bytes, secret)
        stack.callback(relay.stop)
        relay.start()
    return Neighbours(launch.name, transport, secret, cache, relay)


@dataclass(frozen=True)
class Helpers:
    """What works beside the engine. `agents` are those whose rewards are posted; `program` is ours that plays for them."""

    rewards: RewardPool
    environments: EnvironmentPool | None
    listener: socket.socket | None
    client_keys: tuple[bytes, ...]
    agents: Agents | None
    program: AgentProgram | None

    async def start(self) -> None:
        for helper in (self.rewards, self.environments, self.program):
            if helper is not None:
                await helper.start()


def build_helpers(base: Base, stack: AsyncExitStack) -> Helpers:
    config = base.config
    rewards = RewardPool(config.rewards.computed, base.metrics)
    stack.push_async_callback(rewards.close)
    listener = stack.enter_context(listening(config.serve, base.launch.gpus))
    client_keys = read_keys(config.serve.api_key_file)
    environments = EnvironmentPool(config.environment) if config.environment.factory else None
    if environments is not None:
        stack.push_async_callback(environments.close)
    agents = Agents(config.posted_rewards) if config.posted_rewards else None
    program = None
    if agents is not None and listener is not None and config.environment.is_played_outside:
        key = client_keys[0].decode() if client_keys else ""
        program = AgentProgram(config.environment, base_url(listener), key, agents.fail_taken)
        stack.push_async_callback(program.close)
        base.metrics.watch_agent_program(partial(getattr, program, "restarts"))
        base.watch.health.check_ready("environment", partial(getattr, program, "problem"))
    return Helpers(rewards, environments, listener, client_keys, agents, program)


async def start_engine(base: Base, stack: AsyncExitStack) -> Engine:
    """Raises StalledError if it does not answer."""
    started, limit_s = time.monotonic(), base.config.pipeline.stall_timeout_s
    engine = await _build_engine(base, stack)
    try:
        async with asyncio.timeout(limit_s):
            await engine.warm_up()
    except TimeoutError as error:
        raise StalledError(
            f"the engine did not answer its first request within pipeline.stall_timeout_s={limit_s:g} seconds"
            + (f": {outage}" if (outage := engine.outage()) else "")
        ) from error
    engine_s = time.monotonic() - started
    logger.info("engine ready after %.0f s", engine_s)
    base.timeline.record("start", name=base.launch.name, engine_start_s=round(engine_s, 3))
    return engine


async def _build_engine(base: Base, stack: AsyncExitStack) -> Engine:
    if (plugin := engine_plugin(base.config)) is not None:
        return await stack.enter_async_context(plugin.open(base.config))
    logger.info("loading the engine for %s ...", base.config.model.path)
    with uncollected():
        from producer.engine.engine import VllmEngine  # vLLM takes seconds to import

    logs.adopt_libraries()
    with base.seat.settling(base.config.pipeline.stall_timeout_s):
        engine = VllmEngine(base.seat.with_share(base.config), len(base.launch.gpus))
        stack.callback(engine.shutdown)
    return engine
