"""The life of an `rl-producer` process: wiring and order, nothing else.

Guarantee: it starts in the order in which mistakes are cheapest (reward functions, then vLLM's configuration, then
weights, then the wire) and ends in the reverse one. The first SIGTERM or Ctrl-C hands unfinished leases back and exits
with 0, the second exits at once; an exception in any task or thread ends the process.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from producer.environments.agent_program import AgentProgram
from producer.environments.agents import Agents
from producer.environments.atropos import Atropos
from producer.environments.pool import EnvironmentPool
from producer.interfaces import Counters, DownloadedPolicy, Engine, Identity
from producer.link.link import Link
from producer.link.mailbox import Mailbox
from producer.metrics import ProducerMetrics
from producer.policies.registry import AdapterRegistry
from producer.policies.verification import SwapProof
from producer.rewards.pool import RewardPool
from producer.rollouts.admission import Admission
from producer.rollouts.agent_groups import AgentGroups
from producer.rollouts.atropos_groups import AtroposGroups
from producer.rollouts.episodes import Episodes
from producer.rollouts.generation import Generation
from producer.rollouts.in_flight import InFlight
from producer.rollouts.prompts import PromptFormat, load_tokenizer
from producer.serving.generation import ServedEngine
from producer.serving.serving import Serving, base_url, listening, read_keys
from producer.timeline import Timeline
from producer.watchdog import Situation, Watchdog
from protocol.config.run import RunConfig
from protocol.config.swap import TOLERANCES
from protocol.errors import EngineError, ExitCode, StalledError
from protocol.files.scratch import scratch_folder
from protocol.files.shared_memory import SharedMemory, shared_memory
from protocol.processes.lifeline import tie_children
from protocol.security.keys import producer_keys
from protocol.service import logs
from protocol.service.observability import Watch, watched
from protocol.transport.zeromq_client import ZmqClient
from protocol.wire.messages import Lease, PolicyInfo

logger = logging.getLogger(__name__)

_FLUSH_S = 5.0  # for delivering finished groups when asked to stop
_UNWIND_S = 5.0  # for tasks to end when cancelled
_SIGNAL_GRACE_S = 1.0
_WATCH_EVERY_S = 1.0


def run(config: RunConfig, gpus: list[int]) -> ExitCode:
    """Runs until the trainer has finished or a signal comes.

    Raises:
        SlipstreamError: every problem a user can act on.
    """
    tie_children()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_while_starting)
    producer = _Producer(config, gpus)
    with watched(config, "rl-producer", gpus, producer.name) as watch:
        asyncio.run(producer.live(watch))
    return ExitCode.OK


def _leave_while_starting(_number: int, _frame: FrameType | None) -> None:
    """Before there is work to hand back."""
    sys.exit(ExitCode.OK)


def _leave_at_once(_number: int, _frame: FrameType | None) -> None:
    """Also while the loop is blocked, as it is when the engine shuts down. Children follow (`protocol.processes.lifeline`)."""
    os._exit(ExitCode.INTERRUPTED)


def _folder_for(num_bytes: int, memory: SharedMemory, folder: Path) -> Path:
    """Where an adapter is unpacked: in memory, if there is room."""
    return memory.folder if memory.folder is not None and memory.has_room(num_bytes) else folder


class _Producer:
    """The parts, and the link's events brought over to the asyncio loop."""

    def __init__(self, config: RunConfig, gpus: list[int]) -> None:
        self._config = config
        self._gpus = gpus
        transport = config.transport
        self._keys = producer_keys(Path(transport.keys), transport.identity) if transport.keys else None
        owner = self._keys.identity if self._keys else socket.gethostname()[:64]
        self.name = f"{owner}-{os.getpid()}-{secrets.token_hex(2)}"
        self._counters = Counters()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: Serving | None = None
        self._agents = Agents(config.posted_rewards) if config.posted_rewards else None
        self._atropos: Atropos | None = None
        self._program: AgentProgram | None = None

    async def live(self, watch: Watch) -> None:
        config = self._config
        async with AsyncExitStack() as stack:
            timeline = Timeline(Path(config.run_dir) / f"producer-{self.name}.jsonl")
            self._health, self._metrics = watch.health, ProducerMetrics(watch.registry, config.rewards.names)
            rewards = RewardPool(config.rewards.computed, self._metrics)
            stack.push_async_callback(rewards.close)
            folder, memory = stack.enter_context(scratch_folder()), stack.enter_context(shared_memory())
            listener = stack.enter_context(listening(config.serve, self._gpus))
            serve_keys = read_keys(config.serve.api_key_file)
            environments = EnvironmentPool(config.environment) if config.environment.factory else None
            if environments is not None:
                stack.push_async_callback(environments.close)
            if self._agents is not None and listener is not None and config.environment.is_played_outside:
                key = serve_keys[0].decode() if serve_keys else ""
                program = AgentProgram(config.environment, base_url(listener), key, self._agents.fail_taken)
                self._program = program
                stack.push_async_callback(program.close)
                self._metrics.watch_agent_program(lambda: program.restarts)
                self._health.check_ready("environment", lambda: program.problem)
            with self._health.starting("loading reward functions and engine", config.pipeline.stall_timeout_s):
                await rewards.start()
                if environments is not None:
                    await environments.start()
                if self._program is not None:
                    await self._program.start()
                logger.info("loading the engine for %s ...", config.model.path)
                started = time.monotonic()
                from producer.engine.engine import VllmEngine  # vLLM takes seconds to import

                logs.adopt_libraries()
                engine: Engine = VllmEngine(config, len(self._gpus))
                stack.callback(engine.shutdown)
                await self._warm_up(engine)
            logger.info("engine ready after %.0f s", time.monotonic() - started)
            self._wire(engine, rewards, environments, lambda size: _folder_for(size, memory, folder), timeline)
            if listener is not None:
                self._serving = self._endpoint(engine, serve_keys, watch)
                self._spawn(self._serving.run(listener))
            if self._program is not None:
                self._spawn(self._program.run())
            timeline.record("start", name=self.name, engine_start_s=round(time.monotonic() - started, 3))
            try:
                await self._serve(engine, rewards, timeline)
            finally:
                timeline.record("stop", **self._totals())

    async def _warm_up(self, engine: Engine) -> None:
        limit_s = self._config.pipeline.stall_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.warm_up()
        except TimeoutError as error:
            raise StalledError(
                f"the engine did not answer its first request within pipeline.stall_timeout_s={limit_s:g} seconds"
            ) from error

    def _wire(
        self,
        engine: Engine,
        rewards: RewardPool,
        environments: EnvironmentPool | None,
        folder_for: Callable[[int], Path],
        timeline: Timeline,
    ) -> None:
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[None] = self._loop.create_future()
        self._stop = asyncio.Event()
        # One group more than fits, so that places freed by short completions are filled at once.
        max_groups = engine.capabilities.max_num_seqs // config.sampling.num_generations + 1
        channel = ZmqClient(
            self.name,
            config.control_endpoint,
            config.blob_endpoint,
            config.transport.max_message_bytes,
            self._keys,
        )
        mailbox = Mailbox(channel)
        places = Admission(max_groups, config.sampling.num_generations, engine.current_load)
        proof = SwapProof(config.swap.probe_tolerance or TOLERANCES[config.model.dtype])
        evaluation, merged = config.evaluation, not engine.capabilities.holds_versions
        self._adapters = AdapterRegistry(
            engine.weights,
            folder_for,
            proof,
            self._counters,
            self._metrics,
            timeline,
            fetch=mailbox.fetch,
            hold_s=evaluation.hold_swap_s if evaluation and merged else None,
        )
        goes_on = merged and config.swap.on_swap == "continue"  # by itself, without a cut
        tokenizer = load_tokenizer(
            engine.capabilities.tokenizer_folder, trust_remote_code=config.model.trust_remote_code
        )
        rewards.read_thinking(tokenizer, config.dataset.chat_template_kwargs)
        prompts = PromptFormat(tokenizer, engine.capabilities.facts.max_model_len, config.dataset.chat_template_kwargs)
        agent_groups: AgentGroups | AtroposGroups | None = None
        if config.environment.atropos:
            self._atropos = Atropos(
                config, engine.capabilities.facts.max_model_len, lambda: self._counters.policy_version
            )
            agent_groups = AtroposGroups(self._atropos, self._adapters, self._counters, self._metrics)
        elif self._agents is not None:
            agent_groups = AgentGroups(
                config.rewards, self._agents, self._adapters, prompts, rewards, self._counters, self._metrics
            )
        on_swap = "finish" if goes_on else config.swap.on_swap
        in_flight = InFlight(engine, self._adapters, self._counters, on_swap, keeps_weights=not merged)
        episodes = None
        if environments is not None:
            facts = (tokenizer, engine.capabilities.facts.max_model_len)
            episodes = Episodes.of(config, environments, in_flight, *facts, self._counters, engine.tool_parser)
        self._generation = Generation(
            in_flight,
            self._adapters,
            prompts,
            rewards,
            self._counters,
            self._metrics,
            places,
            config.sampling.num_generations,
            self._spawn,
            mailbox.answer,
            agents=agent_groups,
            episodes=episodes,
        )
        self._link = Link(
            mailbox,
            Identity(
                self.name, engine.capabilities.facts, 2 * max_groups, config.swap.mode, evaluates=evaluation is not None
            ),
            config.transport,
            config.control_endpoint,
            self,
            self._counters,
            self._generation.workload,
            lambda: self._health.beat("link"),
        )
        self._watchdog = Watchdog(config.pipeline.stall_timeout_s)
        self._metrics.watch(
            self.name,
            self._counters,
            self._generation.workload,
            self._link.delivery,
            lambda: places.limit,
            lambda: rewards.num_idle,
            rewards.num_workers,
        )
        self._health.check_ready("trainer", lambda: None if self._link.connected else "not connected")
        self._health.check_ready("swap", lambda: self._counters.refusal or None)
        self._health.check_ready("weights", lambda: None if self._counters.policy_version >= 0 else "none are loaded")

    def _endpoint(self, engine: Engine, keys: tuple[bytes, ...], watch: Watch) -> Serving:
        answering, running = engine.openai_server(self._config), self._generation.clock.running
        served = ServedEngine(answering, self._adapters, engine.capabilities.max_num_seqs, running)
        serving = Serving(self._config, self.name, keys, served, watch.registry, self._agents, self._atropos)
        self._health.check_ready("serve", lambda: serving.problem)
        return serving

    async def _serve(self, engine: Engine, rewards: RewardPool, timeline: Timeline) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        for work in (self._adapters.run(), self._adapters.unload_released(), self._watch(engine, rewards, timeline)):
            self._spawn(work)
        self._link.start()
        self._health.started(f"engine ready, trainer at {self._config.control_endpoint}")
        asked = self._loop.create_task(self._stop.wait())
        try:
            waited: list[asyncio.Future[Any]] = [asked, self._outcome]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._outcome.done() and isinstance(self._outcome.exception(), EngineError):
                # The engine core may have got the same signal, and be faster.
                await asyncio.wait({asked}, timeout=_SIGNAL_GRACE_S)
            if not asked.done():
                self._outcome.result()
        finally:
            asked.cancel()
            await self._hand_back()
            if self._outcome.done():
                self._outcome.exception()  # seen; asyncio would complain of one that nobody asked for

    async def _hand_back(self) -> None:
        """Nothing more is begun; what is finished is delivered, what is not is returned."""
        self._health.stopping("handing leases back")
        self._generation.hand_back_all()
        if self._program is not None:
            await self._program.close()  # before the endpoint, which it uses
        for task in self._tasks:
            task.cancel()
        if self._tasks:  # an engine that hangs must not keep the process
            await asyncio.wait(self._tasks, timeout=_UNWIND_S)
        self._link.stop(_FLUSH_S)
        await asyncio.to_thread(self._link.join, _FLUSH_S + 5)

    def _on_signal(self, name: str) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
            signal.signal(number, _leave_at_once)
        logger.info("%s: handing leases back and stopping (once more to stop at once)", name)
        self._stop.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._settle(task.exception(), finished=False)

    def _settle(self, error: BaseException | None, finished: bool) -> None:
        if self._outcome.done() or (error is None and not finished):
            return
        if error is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)

    async def _watch(self, engine: Engine, rewards: RewardPool, timeline: Timeline) -> None:
        """Notes how busy the engine was, and notices that it died while idle or that nothing moves any more."""
        now, busy_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            engine.check_alive()
            self._health.beat("event")
            work, delivery = self._generation.workload(), self._link.delivery()
            before, busy_before_s = now, busy_s
            now, busy_s = time.monotonic(), work.busy_s
            if delivery.connected:
                self._counters.idle_s += max(0.0, (now - before) - (busy_s - busy_before_s))
                timeline.record("stats", **self._totals())
            version = self._counters.policy_version
            situation = Situation(work, delivery, version, rewards.num_workers, rewards.num_idle)
            self._watchdog.check(now, self._counters, situation)

    def _totals(self) -> dict[str, Any]:
        counters, busy_s = self._counters, self._generation.workload().busy_s
        counts = {name: getattr(counters, name) for name in ("tokens", "groups", "failed", "abandoned")}
        return counts | {"busy_s": round(busy_s, 3), "idle_s": round(counters.idle_s, 3)}

    # LinkEvents: called on the link's thread

    def run_began(self, policy: PolicyInfo) -> None:
        self._loop.call_soon_threadsafe(self._generation.abandon_all)
        self._loop.call_soon_threadsafe(self._follow, policy)

    def session_began(self, policy: PolicyInfo) -> None:
        self._loop.call_soon_threadsafe(self._generation.hand_back_above, policy.version)
        self._loop.call_soon_threadsafe(self._follow, policy)

    def _follow(self, policy: PolicyInfo) -> None:
        self._adapters.start_session(policy)
        if self._atropos is not None:
            self._atropos.forget()
        if self._serving is not None:
            self._serving.forget()

    def leased(self, lease: Lease) -> None:
        self._loop.call_soon_threadsafe(self._generation.start, lease)

    def abandoned(self, lease_id: str) -> None:
        self._loop.call_soon_threadsafe(self._generation.abandon, lease_id)

    def policy_arrived(self, downloaded: DownloadedPolicy) -> None:
        self._loop.call_soon_threadsafe(self._adapters.offer, downloaded)

    def policy_refused(self, policy: PolicyInfo, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._adapters.refuse, policy.version, reason)

    def fetched(self, policy: PolicyInfo, downloaded: DownloadedPolicy | None) -> None:
        if downloaded is None:
            self._loop.call_soon_threadsafe(self._adapters.on_unavailable, policy)
        else:
            self._loop.call_soon_threadsafe(self._adapters.on_fetched, downloaded)

    def evaluates(self, policy: PolicyInfo | None) -> None:
        self._loop.call_soon_threadsafe(self._adapters.note_evaluation, policy)

    def outbox_full(self, full: bool) -> None:
        self._loop.call_soon_threadsafe(self._generation.pause, full)

    def ended(self, error: BaseException | None) -> None:
        self._loop.call_soon_threadsafe(self._settle, error, True)
