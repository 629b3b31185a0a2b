"""A vLLM server that is already running, or several, as the producer's engine.

Guarantee: `generate` returns what was sampled on exactly the policy it names, with log-probs of the distribution that was sampled
from, whatever happens to servers meanwhile: a request that is lost is sampled anew, and while no server is ready every request
waits. A server that has never fitted ends the start with every reason; one that fits no longer is waited for.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from producer.engine_contract import (
    Adapter,
    AdapterRefusedError,
    Completion,
    EngineCapabilities,
    EngineLoad,
    EnginePlugin,
    ToolParser,
)
from producer.groups import LeaseFailure
from producer.plugins.engine_server.api import (
    HttpClient,
    ServerBusyError,
    ServerLostError,
    ServerMismatchError,
    ServerRefusedError,
    VllmApi,
    open_session,
)
from producer.plugins.engine_server.folder import ClientFolder, client_folder
from producer.plugins.engine_server.inspection import Inspection
from producer.plugins.engine_server.server import NeededPolicy, Server, joined
from protocol.config.operation import TOLERANCES, is_loopback
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, EngineError
from protocol.wire.handshake import LOGPROBS_MODE
from protocol.wire.messages import EngineFacts, Sampling
from protocol.wire.model_folder import base_model_digest, placeholders_of, resolve_model, tokenizer_digest

logger = logging.getLogger(__name__)

_TIDY_EVERY_S = 5.0
_GOODBYE_S = 10.0  # for unloading what servers have of this producer
_ATTEMPTS = 5  # to generate a group, of which servers failed all before
_BUSY_S = (0.5, 15.0)  # how long to wait at first where a server is busy, and at most
_BUSY_ATTEMPTS = 8
LINGER_S = 30.0  # for which an adapter's files outlive it: vLLM may read them for a request that was just cancelled


@dataclass
class Servers:
    """Told by them when one becomes ready or is lost, by `note_change`."""

    all: list[Server] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> list[Server]:
        return [server for server in self.all if server.is_ready]

    def note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def pick(self) -> Server:
        """The one with the fewest completions in it, as soon as one is ready."""
        await self.wait_until(lambda: bool(self.ready))
        return min(self.ready, key=lambda server: server.in_flight)

    def outage(self) -> str | None:
        """Why nothing can be generated now; None if it can."""
        if self.ready:
            return None
        return "; ".join(f"the server at {server.url} {server.problem}" for server in self.all)


@dataclass
class ServerWeights:
    """The `PolicyWeights` of all servers together."""

    servers: Servers
    needed: dict[int, NeededPolicy]
    folder: ClientFolder
    _retired: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # since when, and what removes it

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

    async def verify(self, adapter: Adapter, token_ids: list[int]) -> list[float]:
        """What the first server computes. Another one that computes something else is not used."""
        policy = self.needed[adapter.id]
        while policy.probe is None:
            server = await self.servers.pick()
            with server.losing():
                try:
                    await server.measure(policy, token_ids)
                except ServerRefusedError as error:
                    server.lose(f"does not score a probe: {error}")
        while not self._everywhere(policy):
            await self.servers.wait_until(lambda: bool(self.servers.ready))
            await self._ensure(policy)
        return policy.probe[1]

    def _everywhere(self, policy: NeededPolicy) -> bool:
        ready = self.servers.ready
        return bool(ready) and all(server.has(policy) for server in ready)

    async def _ensure(self, policy: NeededPolicy) -> None:
        """By all servers that are ready. Raises ServerRefusedError if one that is well refuses."""
        ready = self.servers.ready
        outcomes = await asyncio.gather(*(server.ensure(policy) for server in ready), return_exceptions=True)
        for server, error in zip(ready, outcomes, strict=True):
            if error is None:
                continue
            with server.losing():
                if isinstance(error, ServerRefusedError):
                    await server.api.check_health()  # an engine that is dying refuses, too
                raise error

    def activate(self, adapter: Adapter) -> None:
        """A request may name an adapter as soon as it is loaded."""

    async def discard(self, adapter: Adapter) -> None:
        self.needed.pop(adapter.id, None)
        self._retired.append((time.monotonic(), partial(self.folder.remove, adapter.name)))
        for server in self.servers.all:
            await server.discard(adapter)

    def retire_dead_clients(self) -> None:
        """What clients have left that were killed. Servers unload it when they are inspected."""
        now = time.monotonic()
        self._retired += [(now, partial(self.folder.remove_client, name)) for name in self.folder.dead_clients()]

    async def tidy(self) -> None:
        """Removes the files of what is not needed since a while. To be called every few seconds."""
        await asyncio.to_thread(self.folder.beat)
        now, retired = time.monotonic(), self._retired
        self._retired = [entry for entry in retired if now - entry[0] < LINGER_S]
        for since, remove in retired:
            if now - since >= LINGER_S:
                await asyncio.to_thread(remove)


class ServerEngine:
    """Implements `producer.engine_contract.Engine`; `server_engine` makes it. `capabilities` is there after `warm_up`."""

    capabilities: EngineCapabilities

    def __init__(self, config: RunConfig, inspection: Inspection, servers: Servers, weights: ServerWeights) -> None:
        self._config = config
        self.inspection = inspection
        self.servers = servers
        self.weights = weights
        self._tasks: list[asyncio.Task[None]] = []

    async def warm_up(self) -> None:
        """Until every server was asked and one is ready. Raises EngineError if one does not fit."""
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
        """`cut` is never set: requests there run to their end (`swap.in_flight`)."""
        problem, pause_s, num_busy, num_failed = "", _BUSY_S[0], 0, 0
        while num_failed < _ATTEMPTS and num_busy < _BUSY_ATTEMPTS:
            server = await self.servers.pick()
            try:
                async with server.working(sampling.num_generations):
                    return await server.api.sample(server.names[adapter.id], prompt_ids, sampling, adapter.version)
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
        raise LeaseFailure("generation_failed", f"{num_failed} times in a row the server {problem}")

    def tool_parser(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> ToolParser:
        """vLLM's, which runs here and needs vLLM to be installed."""
        try:
            from producer.engine.tool_calls import ToolCallParser
        except ImportError as error:
            raise ConfigError(
                f"environment.tool_parser: {name} is vLLM's, which is not installed here: {error}"
            ) from error
        return ToolCallParser(name, tokenizer, tools)

    async def sleep(self) -> None:
        raise EngineError("pipeline.gpu: turns is not for engine_server, whose servers have their own GPUs and clients")

    wake = sleep

    def openai_server(self, config: RunConfig) -> Any:
        raise ConfigError("serve.enabled: not with engine_server")

    def current_load(self) -> EngineLoad | None:
        """Of all servers together, a few seconds old."""
        return joined(server.own_load.load for server in self.servers.all)

    def outage(self) -> str | None:
        return self.servers.outage()

    def check_alive(self) -> None:
        """Servers may come and go. Raises what ended a task that must not end."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def say_goodbye(self) -> None:
        """Leaves nothing in servers, and returns when they have let requests go that were cancelled before."""
        self.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                for server in self.servers.ready:
                    with server.losing(), contextlib.suppress(ServerRefusedError):
                        for name in server.names.values():
                            await server.api.unload(name)
                        if server.inspected is not None:  # a request that comes behind those, through the whole server
                            await server.api.score(server.inspected.base, [3, 4])

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
        return EngineCapabilities(facts, folder, max_num_seqs, placeholders=placeholders_of(folder))


@asynccontextmanager
async def server_engine(config: RunConfig) -> AsyncIterator[ServerEngine]:
    """Open the engine of `config.engine_server`. Raises ConfigError where its files or the model cannot be read."""
    section, model = config.engine_server, config.model
    assert section is not None
    logger.info("asking for %s at %s ...", model.path, ", ".join(section.url))
    model_folder = await asyncio.to_thread(
        partial(resolve_model, model.path, model.revision, trust_remote_code=model.trust_remote_code)
    )
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session(section))
        folder = stack.enter_context(client_folder(section.adapter_dir, section.server_adapter_dir))
        tolerance = config.swap.probe_tolerance or TOLERANCES[model.dtype]
        inspection = Inspection(config, model_folder, folder, tolerance, config.sampling.max_completion_length + 1)
        servers, needed = Servers(), dict[int, NeededPolicy]()
        for url in section.url:
            api = VllmApi(HttpClient(session, url.rstrip("/"), section.answer_timeout_s))
            servers.all.append(Server(api, inspection, folder, needed, servers.note_change))
            if section.key_file and urlsplit(url).scheme == "http" and not is_loopback(urlsplit(url).netloc):
                logger.warning(
                    "engine_server.key_file: the key goes to %s unencrypted; use https where others can listen", url
                )
        engine = ServerEngine(config, inspection, servers, ServerWeights(servers, needed, folder))
        stack.push_async_callback(engine.say_goodbye)
        yield engine


def check_servers(config: RunConfig) -> None:
    """Asks every server whether it fits. Raises ConfigError where the section does not, EngineError with every problem of the
    servers."""

    async def problem_of(inspection: Inspection, server: Server) -> str | None:
        with server.losing():
            await inspection.inspect(server.api)
            return None
        return f"the server at {server.url} {server.problem}"

    async def check() -> None:
        async with server_engine(config) as engine:
            found = [await problem_of(engine.inspection, server) for server in engine.servers.all]
            if problems := list(filter(None, found)):
                raise EngineError("engine_server: " + "\n  ".join(problems))

    asyncio.run(check())


PLUGIN = EnginePlugin(server_engine, check_servers)
