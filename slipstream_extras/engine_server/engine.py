"""A vLLM server that is already running, or several, as the producer's engine.

Guarantee: `generate` returns tokens that were sampled on exactly the policy it names, with log-probs of the distribution that
they were sampled from: a request that a server loses is sampled anew, and while no server is ready every request waits. A policy
counts as loaded when every ready server has it, and one server at least is ready; a server that comes later gets it before it is
used. A refusal by one server is a refusal. A server that has never fitted ends the start with every reason; the producer waits
for one that no longer fits.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from producer.engine_contract import (
    Adapter,
    AdapterRefusedError,
    Completion,
    EngineCapabilities,
    EngineLoad,
    EnginePlugin,
    Rows,
    Scored,
    ToolParser,
)
from producer.groups import LeaseFailure
from producer.policies.probe import SwapProof
from protocol.config.operation import is_loopback
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, EngineError
from protocol.http_client import (
    HttpClient,
    ServerBusyError,
    ServerLostError,
    ServerMismatchError,
    ServerRefusedError,
    open_session,
)
from protocol.wire.handshake import LOGPROBS_MODE
from protocol.wire.messages import EngineFacts, Sampling
from protocol.wire.model_folder import base_model_digest, placeholders_of, tokenizer_digest, vocabulary_size
from protocol.wire.model_source import resolve_model
from slipstream_extras.engine_server.api import VllmApi
from slipstream_extras.engine_server.folder import ClientFolder, client_folder
from slipstream_extras.engine_server.inspection import Inspection
from slipstream_extras.engine_server.server import NeededPolicy, Row, Server, joined

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

_TIDY_EVERY_S = 5.0
_GOODBYE_S = 10.0  # for unloading this producer's adapters
_ATTEMPTS = 5  # to generate a group, while servers fail
_BUSY_S = (0.5, 15.0)  # the first pause for a busy server, and the longest
_BUSY_ATTEMPTS = 8
LINGER_S = 30.0  # files outlive their adapter: vLLM may read them for a request that was just cancelled


@dataclass
class Servers:
    """The servers of a run. Each calls `note_change` when it becomes ready, is lost, or has told its load, for which `look` is
    called."""

    all: list[Server] = field(default_factory=list)
    look: Callable[[], None] = lambda: None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> list[Server]:
        return [server for server in self.all if server.is_ready]

    def note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.look()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def pick(self) -> Server:
        """Wait for a ready server, and return the one with the fewest completions."""
        await self.wait_until(lambda: bool(self.ready))
        return min(self.ready, key=lambda server: server.in_flight)

    def outage(self) -> str | None:
        """Return why no server can generate now; None if one can."""
        if self.ready:
            return None
        return "; ".join(f"the server at {server.url} {server.problem}" for server in self.all)


@dataclass
class ServerWeights:
    """The `PolicyWeights` of all servers together."""

    servers: Servers
    needed: dict[int, NeededPolicy]
    folder: ClientFolder
    longest_row: Callable[[], int]  # in tokens
    base: dict[Row, Scored] = field(default_factory=dict)  # rows of the probe without an adapter
    survival: dict[str, float] = field(default_factory=dict)  # a server computes adapters beside its weights
    current: Adapter | None = None
    _retired: list[tuple[float, Callable[[], None]]] = field(
        default_factory=list
    )  # since when, and the function that removes it

    async def load(self, adapter: Adapter) -> None:
        await asyncio.to_thread(self.folder.put, adapter.name, adapter.path)
        policy = self.needed[adapter.id] = NeededPolicy(adapter)
        try:
            while not self._everywhere(policy):
                await self.servers.wait_until(lambda: bool(self.servers.ready))
                await self._ensure(policy)
        except BaseException as error:
            await self.discard(adapter)
            if isinstance(error, ServerRefusedError):
                raise AdapterRefusedError(f"the server refuses it: {error}") from error
            raise

    async def verify(self, adapter: Adapter | None, rows: Rows) -> list[Scored]:
        """Return what the first server computes. A server that computes something else is not used."""
        policy = None if adapter is None else self.needed[adapter.id]
        fitting = [tuple(row[: self.longest_row()]) for row in rows]
        scored = self.base if policy is None else policy.scored
        while missing := [row for row in dict.fromkeys(fitting) if row not in scored]:
            server = await self.servers.pick()
            with server.losing():
                try:
                    if policy is None:
                        scored |= await server.base(missing)
                    else:
                        await server.measure(policy, missing)
                except ServerRefusedError as error:
                    server.lose(f"refuses to score a probe: {error}")
        while policy is not None and not self._everywhere(policy):
            await self.servers.wait_until(lambda: bool(self.servers.ready))
            await self._ensure(policy)
        return [scored[row] for row in fitting]

    def _everywhere(self, policy: NeededPolicy) -> bool:
        ready = self.servers.ready
        return bool(ready) and all(server.has(policy) for server in ready)

    async def _ensure(self, policy: NeededPolicy) -> None:
        """Load a policy into all ready servers. Raises ServerRefusedError if a healthy one refuses."""
        ready = self.servers.ready
        outcomes = await asyncio.gather(*(server.ensure(policy) for server in ready), return_exceptions=True)
        for server, error in zip(ready, outcomes, strict=True):
            if error is None:
                continue
            with server.losing():
                if isinstance(error, ServerRefusedError):
                    await server.api.check_health()  # a dying engine refuses, too
                raise error

    def activate(self, adapter: Adapter) -> None:
        """Note the adapter. A request may name one as soon as it is loaded."""
        self.current = adapter

    async def discard(self, adapter: Adapter) -> None:
        self.needed.pop(adapter.id, None)
        self._retired.append((time.monotonic(), partial(self.folder.remove, adapter.name)))
        for server in self.servers.all:
            await server.discard(adapter)

    def retire_dead_clients(self) -> None:
        """Retire the files of killed clients. Servers unload their adapters at an inspection."""
        now = time.monotonic()
        self._retired += [(now, partial(self.folder.remove_client, name)) for name in self.folder.dead_clients()]

    async def tidy(self) -> None:
        """Remove files of policies that were discarded a while ago. Called every few seconds."""
        await asyncio.to_thread(self.folder.beat)
        now, retired = time.monotonic(), self._retired
        self._retired = [entry for entry in retired if now - entry[0] < LINGER_S]
        for since, remove in retired:
            if now - since >= LINGER_S:
                await asyncio.to_thread(remove)


class ServerEngine:
    """The `Engine` on servers, made by `server_engine`. It has `capabilities` after `warm_up`."""

    capabilities: EngineCapabilities

    def __init__(self, config: RunConfig, inspection: Inspection, servers: Servers, weights: ServerWeights) -> None:
        self._config = config
        self.inspection = inspection
        self.servers = servers
        self.weights = weights
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def warm_up(self) -> None:
        """Wait until every server was asked and one is ready. Raises EngineError if one does not fit."""
        self.weights.retire_dead_clients()
        self._tasks += [
            asyncio.create_task(work) for work in (self._tidy(), *(server.run() for server in self.servers.all))
        ]
        servers = self.servers.all
        asked = asyncio.create_task(self.servers.wait_until(self._is_decided))
        self._tasks.append(asked)
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.check_alive()
        wrong = [f"the server at {server.url} {server.problem}" for server in servers if server.is_mismatch]
        if wrong:
            raise EngineError("engine_server: " + "\n  ".join(wrong))
        length = min(server.inspected.max_model_len for server in servers if server.inspected is not None)
        self.inspection.min_model_len = length
        self.capabilities = self._capabilities(length)

    def _is_decided(self) -> bool:
        servers = self.servers.all
        was_asked = all(server.was_asked for server in servers)
        return any(server.is_mismatch for server in servers) or (was_asked and bool(self.servers.ready))

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, adapter: Adapter, cut: asyncio.Event | None = None
    ) -> list[Completion]:
        """Sample a group. `cut` is never set: requests run to their end (`swap.in_flight`)."""

        def sample(server: Server) -> Awaitable[list[Completion]]:
            return server.api.sample(server.names[adapter.id], prompt_ids, sampling, adapter.version)

        return await self._asked(sampling.num_generations, sample)

    async def score(self, token_ids: list[int], adapter: Adapter) -> list[float]:
        return await self._asked(1, lambda server: server.api.score(server.names[adapter.id], token_ids))

    async def _asked(self, num_places: int, ask: Callable[[Server], Awaitable[_Answer]]) -> _Answer:
        """Ask a ready server, and others while it fails. Raises LeaseFailure after all tries, or if one refuses."""
        problem, pause_s, num_busy, num_failed = "", _BUSY_S[0], 0, 0
        while num_failed < _ATTEMPTS and num_busy < _BUSY_ATTEMPTS:
            server = await self.servers.pick()
            try:
                async with server.working(num_places):
                    return await ask(server)
            except ServerBusyError as error:
                num_busy, problem = num_busy + 1, str(error)
                await asyncio.sleep(min(error.retry_after_s or pause_s, _BUSY_S[1]))
                pause_s *= 2
            except (ServerLostError, ServerMismatchError) as error:
                num_failed, problem = num_failed + 1, str(error)
                with server.losing():
                    raise
            except ServerRefusedError as error:
                if error.status < 500 and error.status != 404:
                    raise LeaseFailure("generation_failed", f"vLLM refused: {error}") from error
                num_failed, problem = num_failed + 1, f"failed: {error}"
                server.lose(problem)
        if num_failed < _ATTEMPTS:
            raise LeaseFailure("returned", problem)
        raise LeaseFailure("generation_failed", f"it failed {num_failed} times; the last time the server {problem}")

    def tool_parser(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> ToolParser:
        """Make a parser of vLLM's, which runs here and needs vLLM to be installed."""
        try:
            from producer.engine.tool_calls import ToolCallParser
        except ImportError as error:
            raise ConfigError(
                f"environment.tool_parser: {name} is a parser of vLLM, which is not installed here: {error}; install it"
            ) from error
        return ToolCallParser(name, tokenizer, tools)

    async def sleep(self) -> None:
        raise EngineError(
            "pipeline.gpu: turns cannot be used with engine_server, whose servers have their own GPUs and clients"
        )

    wake = sleep

    def openai_server(self, config: RunConfig) -> Any:
        raise ConfigError("serve.enabled: true cannot be used with engine_server; remove one of them")

    def current_load(self) -> EngineLoad | None:
        """Return the load of all servers together, by reports of the last second and what was asked since."""
        return joined(server.load for server in self.servers.all)

    def watch_load(self, look: Callable[[], None]) -> None:
        self.servers.look = look

    def outage(self) -> str | None:
        return self.servers.outage()

    def check_alive(self) -> None:
        """Raise the error of a task that has ended. Servers may come and go."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def note_end(self) -> None:
        self._is_over = True

    def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def say_goodbye(self) -> None:
        """Unload everything from the servers, and wait until cancelled requests have left them. After a run that is finished they
        go on with its last policy."""
        self.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                for server in self.servers.ready:
                    with server.losing(), contextlib.suppress(ServerRefusedError):
                        for name in server.names.values():
                            await server.api.unload(name)
                        if server.inspected is not None:  # this request queues behind them, through the whole server
                            await server.api.score(server.inspected.base, [3, 4])

        section, current = self._config.engine_server, self.weights.current
        if self._is_over and section is not None and section.final_name is not None and current is not None:
            try:
                await self._leave(current, section.final_name)
            except (OSError, TimeoutError, ServerLostError, ServerRefusedError) as error:
                logger.warning("no server goes on serving the final policy (engine_server.final_name): %s", error)

    async def _leave(self, adapter: Adapter, name: str) -> None:
        """Load the adapter under the name for those who come after this run, in place of one that a run left before."""
        path = await asyncio.to_thread(self.weights.folder.settle, adapter.name, name)
        async with asyncio.timeout(_GOODBYE_S):
            for server in self.servers.ready:
                named = [card for card in await server.api.models() if card.id == name]
                if named and named[0].root != path:
                    raise ServerRefusedError(409, f"{server.url} has another model of the name {name}")
                if named:
                    await server.api.unload(name)
                await server.api.load(name, path)
                logger.info("the server at %s goes on serving policy v%d as %s", server.url, adapter.version, name)

    async def _tidy(self) -> None:
        while True:
            await self.weights.tidy()
            await asyncio.sleep(_TIDY_EVERY_S)

    def _capabilities(self, max_model_len: int) -> EngineCapabilities:
        config, folder = self._config, self.inspection.model_folder
        assert config.engine_server is not None
        trusted = config.model.trust_remote_code
        facts = EngineFacts(
            base_model_digest=base_model_digest(folder, trust_remote_code=trusted),
            tokenizer_digest=tokenizer_digest(folder, trust_remote_code=trusted),
            dtype=config.model.dtype,
            logprobs_mode=LOGPROBS_MODE,
            max_lora_rank=config.max_lora_rank,
            max_loras=config.max_loras,
            max_model_len=max_model_len,
            reward_names=list(config.reward_names),
            quantization=str(config.engine.get("quantization") or ""),
            trainer_quantization=config.model.quantization or "",
        )
        max_num_seqs = config.engine_server.max_requests * len(self.servers.all)
        return EngineCapabilities(
            facts, folder, max_num_seqs, placeholders=placeholders_of(folder), vocab_size=vocabulary_size(folder)
        )


@asynccontextmanager
async def server_engine(config: RunConfig) -> AsyncIterator[ServerEngine]:
    """Open the engine of `config.engine_server`. Raises ConfigError if its files or the model cannot be read."""
    section, model = config.engine_server, config.model
    assert section is not None
    logger.info("asking for %s at %s ...", model.path, ", ".join(section.url))
    model_folder = await asyncio.to_thread(
        partial(resolve_model, model.path, model.revision, trust_remote_code=model.trust_remote_code)
    )
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session(section))
        folder = stack.enter_context(client_folder(section.adapter_dir, section.server_adapter_dir))
        proof = SwapProof(config.probe_tolerance, config.probe_slack)
        inspection = Inspection(config, model_folder, folder, proof, config.sampling.max_completion_length + 1)
        servers, needed = Servers(), dict[int, NeededPolicy]()
        weights = ServerWeights(servers, needed, folder, lambda: inspection.min_model_len - 1)
        for url in section.url:
            api = VllmApi(HttpClient(session, url.rstrip("/"), section.answer_timeout_s))
            servers.all.append(Server(api, inspection, folder, needed, weights.base, servers.note_change))
            if section.key_file and urlsplit(url).scheme == "http" and not is_loopback(urlsplit(url).netloc):
                logger.warning(
                    "engine_server.key_file: the key goes to %s unencrypted; use https if others can read this network",
                    url,
                )
        engine = ServerEngine(config, inspection, servers, weights)
        stack.push_async_callback(engine.say_goodbye)
        yield engine


PLUGIN = EnginePlugin(server_engine)
