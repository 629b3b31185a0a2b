"""All servers of a run: which one takes the next group, and how they take up policies.

Guarantee: a policy is loaded when every server that is ready has it, and one server at least is; servers that come later get it
before they are used. While none is ready everything here waits. A refusal by one of them is one by all.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from producer.engine_server.adapter_folder import ClientFolder
from producer.engine_server.http_client import ServerRefusedError
from producer.engine_server.server import NeededPolicy, Server
from producer.interfaces import Adapter, AdapterRefusedError

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
