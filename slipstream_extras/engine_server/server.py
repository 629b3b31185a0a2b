"""A server, with its readiness and its policies.

Guarantee: a server is ready only after it was inspected and has every needed policy, each loaded under a name that was never used
before and, once one server has computed its probe, computing the same. A lost server, or one with a wrong answer, stops being
ready at once; it is inspected again until it is ready, and each reason is logged. Of preemptions a producer counts its share of
the requests in the server. A counter that begins again, and a metric that is missing or absurd, count nothing. What this producer
has asked since a report waits in the load; of what it had in the server then, the part is left that its requests are.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from producer.engine_contract import Adapter, EngineLoad, EngineSteps, Scored
from protocol.http_client import ServerLostError, ServerMismatchError, ServerRefusedError
from slipstream_extras.engine_server.api import VllmApi
from slipstream_extras.engine_server.folder import ClientFolder
from slipstream_extras.engine_server.inspection import Inspected, Inspection

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0
_ASK_AGAIN_S = (0.2, 2.0)  # the first pause, and the longest
_REMIND_EVERY_S = 10.0
_NOT_ASKED = "has not been asked yet"


@dataclass
class OwnLoad:
    """The load of one server, with this producer's share of its preemptions."""

    load: EngineLoad | None = None  # of the last report
    _before: int | None = None  # preemptions in the last report
    _own: float = 0.0  # this producer's share
    _in_flight: int = 0  # completions of this producer then

    def note(self, told: EngineLoad | None, in_flight: int) -> None:
        """Note a report of the server, which has `in_flight` completions of this producer."""
        if told is None:
            return
        self._in_flight = in_flight
        if self._before is not None and told.preemptions > self._before:
            requests = max(1, in_flight, told.running + told.waiting)
            self._own += (told.preemptions - self._before) * in_flight / requests
        self._before = told.preemptions
        self.load = replace(told, preemptions=int(self._own))

    def now(self, num_left: int, num_new: int) -> EngineLoad | None:
        """Estimate the load where this producer has `num_left` completions of those at the report, and `num_new` since."""
        if self.load is None:
            return None
        load, share = self.load, 1.0
        if num_then := load.running + load.waiting:
            own = min(num_then, self._in_flight) / num_then
            share -= own * (1 - num_left / max(1, self._in_flight))
        running, waiting = round(share * load.running), round(share * load.waiting) + num_new
        return replace(load, kv_cache_usage=share * load.kv_cache_usage, running=running, waiting=waiting)


Row = tuple[int, ...]


@dataclass
class NeededPolicy:
    """A policy that every server must have. `scored` holds rows of its probe, as the first server that was asked computed
    them."""

    adapter: Adapter
    scored: dict[Row, Scored] = field(default_factory=dict)


class Server:
    """A server that `run` keeps usable. `needed` has the policies by the id of their adapter, `expected_base` the rows of the
    probe without an adapter, as the first server computed them; both belong to `ServerWeights`. `on_change` is called when the
    server becomes ready, or stops being ready."""

    def __init__(
        self,
        api: VllmApi,
        inspection: Inspection,
        folder: ClientFolder,
        needed: dict[int, NeededPolicy],
        expected_base: dict[Row, Scored],
        on_change: Callable[[], None],
    ) -> None:
        self.url = api.url
        self.api = api
        self.inspected: Inspected | None = None
        self._own_load = OwnLoad()
        self.names: dict[int, str] = {}  # of its adapters, by id
        self.problem: str | None = _NOT_ASKED  # why the server is not ready
        self.is_mismatch = False  # the server answers, and this run cannot use it
        self._inspection = inspection
        self._folder = folder
        self._needed = needed
        self._expected_base = expected_base
        self._on_change = on_change
        self._proved: set[tuple[int, Row]] = set()
        self._asked: set[str] = set()  # names under which the server may have the KV of a probe
        self._base: dict[Row, Scored] = {}
        self._requests: dict[asyncio.Timeout, tuple[float, int]] = {}  # since when, and how many completions
        self._reported_at = -math.inf  # when the last report of its load was asked for
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()
        self._lost = asyncio.Event()
        self._since = self._reminded_at = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self.problem is None

    @property
    def in_flight(self) -> int:
        """The completions of this producer that it has."""
        return sum(count for _, count in list(self._requests.values()))

    @property
    def load(self) -> EngineLoad | None:
        """The load by now; None while it says nothing. Any thread may read it."""
        requests = list(self._requests.values())
        num_new = sum(count for since, count in requests if since >= self._reported_at)
        return self._own_load.now(sum(count for _, count in requests) - num_new, num_new)

    @property
    def was_asked(self) -> bool:
        return self.problem != _NOT_ASKED

    @contextlib.asynccontextmanager
    async def working(self, count: int) -> AsyncIterator[None]:
        """Hold `count` completions in the server. Raises ServerLostError when it is gone, which a connection may not show."""
        limit = asyncio.timeout(None)
        self._requests[limit] = time.monotonic(), count
        try:
            async with limit:
                yield
        except TimeoutError:
            raise ServerLostError("is gone") from None
        finally:
            del self._requests[limit]

    def lose(self, problem: str, *, is_mismatch: bool = False) -> None:
        """Stop being ready for this reason, until the next inspection passes."""
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
        """Mark the server lost on an error within. A refusal passes through: the caller decides about it."""
        try:
            yield
        except ServerLostError as error:
            self.lose(str(error))
        except ServerMismatchError as error:
            self.lose(str(error), is_mismatch=True)
        except OSError as error:
            self.lose(f"cannot be given policies through engine_server.adapter_dir: {error}")

    def has(self, policy: NeededPolicy) -> bool:
        """Return whether a policy is loaded, and proved if it has a probe."""
        number = policy.adapter.id
        return number in self.names and all((number, row) in self._proved for row in policy.scored)

    async def run(self) -> None:
        """Inspect the server, load its policies and watch it, until cancelled."""
        pause_s, longest_s = _ASK_AGAIN_S
        while True:
            was_ready = False
            with self.losing():
                try:
                    await self._prepare()
                    was_ready, pause_s = True, _ASK_AGAIN_S[0]
                    await self._watch()
                except ServerRefusedError as error:
                    self.lose(f"refuses a policy that it must have: {error}")
            if not was_ready:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    async def ensure(self, policy: NeededPolicy) -> None:
        """Load a policy into the server, unless it is there, and compute its probe. Raises ServerRefusedError if the server
        refuses it, ServerMismatchError if it computes other log-probs than other servers, ServerLostError and OSError."""
        adapter = policy.adapter
        async with self._loading:
            if adapter.id in self._needed and adapter.id not in self.names:
                await asyncio.to_thread(self._folder.put, adapter.name, adapter.path)
                name = f"{self._folder.name}-{adapter.name}-{next(self._numbers)}"
                await self.api.load(name, self._folder.server_path(adapter.name))
                self.names[adapter.id] = name
            if adapter.id in self._needed and not self.has(policy):
                await self._prove(policy)

    async def measure(self, policy: NeededPolicy, rows: list[Row]) -> None:
        """Compute rows of the probe on this server first. The other servers have to compute the same."""
        async with self._loading:
            name = self.names.get(policy.adapter.id)
            if name is None:
                raise ServerLostError(f"has lost policy v{policy.adapter.version}")
            policy.scored |= await self._score(name, rows)
            self._proved |= {(policy.adapter.id, row) for row in rows}

    async def base(self, rows: list[Row]) -> dict[Row, Scored]:
        """Compute rows of the probe without an adapter, once for every inspection."""
        if missing := [row for row in rows if row not in self._base]:
            if self.inspected is None:
                raise ServerLostError("has not been inspected")
            scored = await self.api.verify(self.inspected.base, [list(row) for row in missing], is_base=True)
            self._base |= zip(missing, scored, strict=True)
        return {row: self._base[row] for row in rows}

    async def discard(self, adapter: Adapter) -> None:
        """Unload an adapter. A server that is not ready unloads it at its next inspection."""
        async with self._loading:
            name = self.names.pop(adapter.id, None)
            self._proved = {(number, row) for number, row in self._proved if number != adapter.id}
            self._asked.discard(str(name))
            if name is not None and self.is_ready:
                with self.losing(), contextlib.suppress(ServerRefusedError):  # the server may have lost it
                    await self.api.unload(name)

    async def _prove(self, policy: NeededPolicy) -> None:
        adapter, proof, rows = policy.adapter, self._inspection.proof, list(policy.scored)
        known = self._expected_base
        base = await self.base([row for row in rows if row in known])
        for row, scored in (await self._score(self.names[adapter.id], rows)).items():
            bases = (base[row], known[row]) if row in base else None
            problem = proof.unlike(scored, policy.scored[row], bases, rows)
            if problem:
                self.names.pop(adapter.id)
                raise ServerMismatchError(
                    f"computes policy v{adapter.version} differently from another server ({problem}): start it with the weights "
                    "of model.path, and again if it has them"
                )
            self._proved.add((adapter.id, row))

    async def _score(self, name: str, rows: list[Row]) -> dict[Row, Scored]:
        """Compute rows under the adapter `name`. After the first try, whose answer may be lost, the prefix cache has them."""
        was_asked = name in self._asked
        self._asked.add(name)
        scored = await self.api.verify(name, [list(row) for row in rows], is_base=False)
        return dict(zip(rows, [one._replace(cached=0) for one in scored] if was_asked else scored, strict=True))

    async def _watch(self) -> None:
        """Check the server's health while it is ready."""
        while self.is_ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), _CHECK_EVERY_S)
            if self.is_ready:
                try:
                    await self.api.check_health()
                except ServerLostError:
                    for limit in self._requests:
                        if not limit.expired():
                            limit.reschedule(0.0)
                    raise
                asked_at, in_flight = time.monotonic(), self.in_flight
                told = await self.api.scheduler_load()
                if told is not None:
                    self._reported_at = asked_at
                    self._own_load.note(told, in_flight)
                    self._on_change()

    async def _prepare(self) -> None:
        self.inspected = await self._inspection.inspect(self.api)
        self._base.clear()
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
        """Forget adapters that the server has lost. Unload those that are not needed, of this client and of dead ones."""
        offered = {card.id: card.root or "" for card in await self.api.models() if card.parent is not None}
        self.names = {number: name for number, name in self.names.items() if name in offered and number in self._needed}
        self._proved = {(number, row) for number, row in self._proved if number in self.names}
        self._asked &= set(self.names.values())
        for name, root in offered.items():
            owner = self._folder.owner_of(root)
            is_left = owner == self._folder.name and name not in self.names.values()
            if is_left or (owner is not None and await asyncio.to_thread(self._folder.is_dead, owner)):
                logger.info("unloading %s from the server at %s: it is not needed", name, self.url)
                with contextlib.suppress(ServerRefusedError):  # another client was faster
                    await self.api.unload(name)


def joined(loads: Iterable[EngineLoad | None]) -> EngineLoad | None:
    """Add up the loads of several servers; None if no server reports one."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return EngineLoad(
        max(load.kv_cache_usage for load in known),
        sum(load.running for load in known),
        sum(load.waiting for load in known),
        sum(load.preemptions for load in known),
        EngineSteps(*map(_sum_if_told, *(load.steps for load in known))),
    )


def _sum_if_told(*totals: int | None) -> int | None:
    told = [total for total in totals if total is not None]
    return sum(told) if len(told) == len(totals) else None
