"""One server: whether it can be used now, and which policies it has.

Guarantee: a server is ready only after it was inspected and has every policy that is needed, each loaded under a name that was
never used before and, once servers have shown what it computes, computing the same. One that is lost or answers wrongly is not
ready at once; it is asked again and again, visibly, and nobody else has to ask for that.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass

from producer.engine_contract import Adapter, EngineLoad
from producer.plugins.engine_server.api import ServerLostError, ServerMismatchError, ServerRefusedError, VllmApi
from producer.plugins.engine_server.folder import ClientFolder
from producer.plugins.engine_server.inspection import Inspected, Inspection

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_ASK_AGAIN_S = (0.2, 2.0)  # at first, and at most
_REMIND_EVERY_S = 10.0
_NOT_ASKED = "has not been asked yet"


@dataclass
class OwnLoad:
    """Of one server, as far as it was told."""

    load: EngineLoad | None = None
    _before: int | None = None  # preemptions, as the server told them last
    _own: float = 0.0  # of them

    def note(self, told: EngineLoad | None, in_flight: int) -> None:
        """What a server says now, with so many completions of this producer in it."""
        if told is None:
            return
        if self._before is not None and told.preemptions > self._before:
            requests = max(1, in_flight, told.running + told.waiting)
            self._own += (told.preemptions - self._before) * in_flight / requests
        self._before = told.preemptions
        self.load = EngineLoad(told.kv_cache_usage, told.running, told.waiting, int(self._own))


@dataclass
class NeededPolicy:
    """A policy that every server has to have; `probe` is what servers compute for it: tokens, and log-probs of all but the
    first."""

    adapter: Adapter
    probe: tuple[list[int], list[float]] | None = None


class Server:
    """`run` keeps it usable. `needed` are the policies by the id of their adapter, which others add and remove; `on_change` is
    called when it becomes ready, or stops being it."""

    def __init__(
        self,
        api: VllmApi,
        inspection: Inspection,
        folder: ClientFolder,
        needed: dict[int, NeededPolicy],
        on_change: Callable[[], None],
    ) -> None:
        self.url = api.url
        self.api = api
        self.inspected: Inspected | None = None
        self.in_flight = 0
        self.own_load = OwnLoad()
        self.names: dict[int, str] = {}  # of the adapters that it has, by id
        self.problem: str | None = _NOT_ASKED  # why it is not ready
        self.is_mismatch = False  # it answers, and this run cannot use it
        self._inspection = inspection
        self._folder = folder
        self._needed = needed
        self._on_change = on_change
        self._proved: set[int] = set()
        self._limits: set[asyncio.Timeout] = set()  # of the requests in it that were not told to leave
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()
        self._lost = asyncio.Event()
        self._since = self._reminded_at = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self.problem is None

    @property
    def was_asked(self) -> bool:
        return self.problem != _NOT_ASKED

    @contextlib.asynccontextmanager
    async def working(self, count: int) -> AsyncIterator[None]:
        """While so many completions are in it. Raises ServerLostError when it is gone, which a connection may not tell."""
        limit = asyncio.timeout(None)
        self.in_flight += count
        self._limits.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            raise ServerLostError("is gone") from None
        finally:
            self.in_flight -= count
            self._limits.discard(limit)

    def lose(self, problem: str, *, is_mismatch: bool = False) -> None:
        """It is not ready any more, for this reason, until it has been inspected again."""
        now, is_news = time.monotonic(), self.is_ready or not self.was_asked
        self.problem, self.is_mismatch = problem, is_mismatch
        if is_news or now - self._reminded_at >= _REMIND_EVERY_S:
            self._since = now if is_news else self._since
            self._reminded_at = now
            logger.warning("the server at %s %s; waiting for it (%.0f s)", self.url, problem, now - self._since)
        self._lost.set()
        self._on_change()

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        """What goes wrong within is why it is not ready any more. Not what it refuses, which is the caller's to judge."""
        try:
            yield
        except ServerLostError as error:
            self.lose(str(error))
        except ServerMismatchError as error:
            self.lose(str(error), is_mismatch=True)
        except OSError as error:
            self.lose(f"cannot be given policies through engine_server.adapter_dir: {error}")

    def has(self, policy: NeededPolicy) -> bool:
        """It is loaded, and proved if that can be."""
        number = policy.adapter.id
        return number in self.names and (policy.probe is None or number in self._proved)

    async def run(self) -> None:
        """Until it is cancelled."""
        pause_s, longest_s = _ASK_AGAIN_S
        while True:
            was_ready = False
            with self.losing():
                try:
                    await self._prepare()
                    was_ready, pause_s = True, _ASK_AGAIN_S[0]
                    await self._watch()
                except ServerRefusedError as error:
                    self.lose(f"refuses what it must take: {error}")
            if not was_ready:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    async def ensure(self, policy: NeededPolicy) -> None:
        """Has it load a policy, unless it has it, and compute its probe. Raises ServerRefusedError if it does not take it,
        ServerMismatchError if it computes something else than other servers, ServerLostError and OSError."""
        adapter = policy.adapter
        async with self._loading:
            if adapter.id in self._needed and adapter.id not in self.names:
                await asyncio.to_thread(self._folder.put, adapter.name, adapter.path)
                name = f"{self._folder.name}-{adapter.name}-{next(self._numbers)}"
                await self.api.load(name, self._folder.server_path(adapter.name))
                self.names[adapter.id] = name
            if adapter.id in self._needed and not self.has(policy):
                await self._prove(policy)

    async def measure(self, policy: NeededPolicy, token_ids: list[int]) -> None:
        """Has it compute the probe first: what it says is what others have to compute."""
        async with self._loading:
            name = self.names.get(policy.adapter.id)
            if name is None:
                raise ServerLostError(f"has lost policy v{policy.adapter.version}")
            policy.probe = token_ids, await self.api.score(name, token_ids)
            self._proved.add(policy.adapter.id)

    async def discard(self, adapter: Adapter) -> None:
        """Has it unload an adapter. What cannot be said to it now is mended when it is ready again."""
        async with self._loading:
            name = self.names.pop(adapter.id, None)
            self._proved.discard(adapter.id)
            if name is not None and self.is_ready:
                with self.losing(), contextlib.suppress(ServerRefusedError):  # it may not know it any more
                    await self.api.unload(name)

    async def _prove(self, policy: NeededPolicy) -> None:
        assert policy.probe is not None
        (token_ids, expected), adapter = policy.probe, policy.adapter
        logprobs = await self.api.score(self.names[adapter.id], token_ids)
        worst = max(abs(one - other) for one, other in zip(logprobs, expected, strict=True))
        if not worst <= self._inspection.tolerance:
            self.names.pop(adapter.id)
            raise ServerMismatchError(
                f"computes policy v{adapter.version} otherwise than it was proved (log-probs differ by {worst:.2g}): start it "
                "with the weights of model.path"
            )
        self._proved.add(adapter.id)

    async def _watch(self) -> None:
        """While it is ready."""
        while self.is_ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), _LOOK_EVERY_S)
            if self.is_ready:
                try:
                    await self.api.check_health()
                except ServerLostError:
                    while self._limits:
                        self._limits.pop().reschedule(0.0)
                    raise
                self.own_load.note(await self.api.scheduler_load(), self.in_flight)

    async def _prepare(self) -> None:
        self.inspected = await self._inspection.inspect(self.api)
        async with self._loading:
            await self._unload_strange()
        while missing := [policy for policy in self._needed.values() if not self.has(policy)]:
            for policy in missing:
                await self.ensure(policy)
        self._lost.clear()
        self.problem, self.is_mismatch = None, False
        logger.info("the server at %s is ready, with %d policies", self.url, len(self.names))
        self._on_change()

    async def _unload_strange(self) -> None:
        """Forgets what it has lost, and has it unload what nobody needs: of this client, and of those that are dead."""
        offered = {card.id: card.root or "" for card in await self.api.models() if card.parent is not None}
        self.names = {number: name for number, name in self.names.items() if name in offered and number in self._needed}
        self._proved &= self.names.keys()
        for name, root in offered.items():
            owner = self._folder.owner_of(root)
            is_left = owner == self._folder.name and name not in self.names.values()
            if is_left or (owner is not None and await asyncio.to_thread(self._folder.is_dead, owner)):
                logger.info("the server at %s still had %s, which nobody needs: unloading it", self.url, name)
                with contextlib.suppress(ServerRefusedError):  # another one was faster
                    await self.api.unload(name)


def joined(loads: Iterable[EngineLoad | None]) -> EngineLoad | None:
    """Of several servers that take the same number of groups; None if none says anything."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return EngineLoad(
        max(load.kv_cache_usage for load in known),
        sum(load.running for load in known),
        sum(load.waiting for load in known),
        sum(load.preemptions for load in known),
    )
