"""The share of the engine that clients have: the policy version that answers a request, the time for which clients keep a version
loaded, and the number of their completions at once.

Guarantee: a request runs on one version to its end, and its answer can name it. Clients hold at most `max_versions` superseded
versions by name, each no longer than `ttl_s` after its last use. Requests without a version run on at most two superseded ones,
because they begin on an older version while two have not drained. So training never waits for a LoRA slot, whatever clients do.
Clients have at most `limit` completions in the engine at once, so that training keeps the rest. The request that has waited
longest enters first; when too many wait, the next one is refused at once.
"""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from producer.engine_contract import Adapter
from producer.engine_gate import FifoQueue
from producer.policies.registry import AdapterRegistry
from slipstream_extras.endpoint.openai import RefusedError, malformed

POLICY = "policy"
_NAME = re.compile(rf"{POLICY}(?:@v(\d{{1,10}}))?")
_MAX_DRAINING = 2


def model_name(version: int) -> str:
    return f"{POLICY}@v{version}"


@dataclass(eq=False)
class _Use:
    """The use that clients make of one adapter."""

    adapter: Adapter
    pin: ExitStack = field(default_factory=ExitStack)
    active: int = 0
    used_at: float = -math.inf
    named_at: float = -math.inf

    @property
    def is_named(self) -> bool:
        return self.named_at > -math.inf


@dataclass
class ServedVersions:
    """The policy versions that clients may ask for. If `is_merged`, the engine has a single one at a time."""

    adapters: AdapterRegistry
    max_versions: int
    ttl_s: float
    is_merged: bool
    clock: Callable[[], float] = time.monotonic
    _uses: dict[Adapter, _Use] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names that clients may use now, the newest version first."""
        current = self.adapters.current
        if current is None:
            return []
        older = [] if self.is_merged else [adapter.version for adapter in self._uses if adapter is not current]
        return [POLICY, model_name(current.version), *map(model_name, sorted(older, reverse=True))]

    @asynccontextmanager
    async def use(self, name: str, floor: int = 0) -> AsyncIterator[Adapter]:
        """Keep the adapter of this name loaded within the context. Waits for version `floor`, and takes no older one. Raises
        RefusedError if there is no such version, or too many are held."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise self._unknown(name)
        await self.adapters.wait_for(floor)
        adapter = self._choose(floor) if found[1] is None else self._named(name, int(found[1]))
        use = self._use_of(adapter)
        use.active += 1
        try:
            yield adapter
        finally:
            use.active -= 1
            use.used_at = self.clock()
            if not use.active and self._uses.get(adapter) is not use:  # `close` has unpinned the others meanwhile
                use.pin.close()
            self.release_unused()

    def release_unused(self) -> None:
        """Unpin the versions that no client may use any more."""
        now = self.clock()
        idle = [use for use in self._uses.values() if not use.active and use.adapter is not self.adapters.current]
        idle.sort(key=lambda use: (use.named_at, use.used_at), reverse=True)
        num_named = sum(use.active > 0 and use.is_named for use in self._uses.values())
        kept = 0 if self.is_merged else max(0, self.max_versions - num_named)
        for rank, use in enumerate(idle):
            if rank >= kept or now - max(use.named_at, use.used_at) >= self.ttl_s:
                del self._uses[use.adapter]
                use.pin.close()

    def close(self) -> None:
        """Unpin all versions; those in use as soon as their last request has ended."""
        while self._uses:
            _, use = self._uses.popitem()
            if not use.active:
                use.pin.close()

    def forget(self) -> None:
        """Drop all names: another trainer process may give the same versions to other weights."""
        for use in self._uses.values():
            use.used_at = use.named_at = -math.inf
        self.release_unused()

    def _use_of(self, adapter: Adapter) -> _Use:
        if adapter not in self._uses:
            use = self._uses[adapter] = _Use(adapter)
            use.pin.enter_context(self.adapters.pin(adapter))
        return self._uses[adapter]

    def _choose(self, floor: int) -> Adapter:
        current = self.adapters.current
        assert current is not None
        active = [use for use in self._uses.values() if use.active]
        draining = [use.adapter for use in active if not use.is_named and use.adapter is not current]
        is_used = any(use.adapter is current for use in active)
        if self.is_merged or is_used or len(draining) < _MAX_DRAINING:
            return current
        newest = max(draining, key=lambda adapter: adapter.version)
        return newest if newest.version >= floor else current

    def _named(self, name: str, version: int) -> Adapter:
        current = self.adapters.current
        assert current is not None
        known = [current] if self.is_merged else [current, *self._uses]
        adapter = next((adapter for adapter in known if adapter.version == version), None)
        if adapter is None:
            raise self._unknown(name)
        if not self.is_merged:
            self._make_room(adapter)
            self._use_of(adapter).named_at = self.clock()
        return adapter

    def _make_room(self, adapter: Adapter) -> None:
        """Make room for another named version: the least recently used name is dropped."""
        named = [use for use in self._uses.values() if use.is_named]
        if len(named) < max(1, self.max_versions) or any(use.adapter is adapter for use in named):
            return
        idle = [use for use in named if not use.active]
        if not idle:
            fix = f"clients already use {len(named)} versions by name (serve.max_versions); ask for {POLICY}"
            raise RefusedError(429, "busy", fix)
        min(idle, key=lambda use: use.named_at).named_at = -math.inf

    def _unknown(self, name: str) -> RefusedError:
        why = "the engine has a single version at a time" if self.is_merged else "others are not loaded"
        there = ", ".join(self.names()) or "nothing yet"
        message = f"there is no model {name[:80]!r}; there is: {there} ({why})"
        return RefusedError(404, "unknown_model", message, "model")


@dataclass
class ClientLimiter:
    """The limit of clients' completions in the engine. vLLM's own queue is first come, first served, and training keeps it short
    (`producer.rollouts.admission`), so an admitted request runs soon."""

    limit: int
    max_waiting: int
    taken: int = 0  # completions in the engine
    _line: FifoQueue[int] = field(default_factory=FifoQueue)

    @property
    def num_waiting(self) -> int:
        return len(self._line.pending)

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Hold room for `count` completions within the context, after waiting for it. Raises RefusedError if the limit is below
        `count`, or too many requests wait."""
        if count > self.limit:
            raise malformed(f"{count} completions are more than the {self.limit} of serve.max_requests", "n")
        if self.num_waiting or self.taken + count > self.limit:
            await self._wait(count)
        else:
            self.taken += count
        try:
            yield
        finally:
            self._give_back(count)

    async def _wait(self, count: int) -> None:
        if self.num_waiting >= self.max_waiting:
            raise RefusedError(429, "busy", f"{self.num_waiting} requests wait already (serve.max_waiting)")
        try:
            await self._line.wait(count, take_back=lambda: self._give_back(count))
        except asyncio.CancelledError:
            self._let_in()  # smaller requests may wait behind this one
            raise

    def _give_back(self, count: int) -> None:
        self.taken -= count
        self._let_in()

    def _let_in(self) -> None:
        for count in self._line.pending:
            if self.taken + count > self.limit:
                return
            self.taken += count
            self._line.grant()
