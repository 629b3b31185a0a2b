"""The policy versions that the engine holds.

Guarantee: a request runs on the adapter it pinned to its end; a superseded version is unloaded only when nothing pins it and no
evaluation needs it. Groups that have become too old to be trained are ended, so that training pins at most `max_staleness` + 1
versions of one trainer. Callers that let a version go do not wait for that and cannot be cancelled in the middle of it: the
registry's own task unloads. A version that cannot be loaded, or that the engine does not compute as the trainer
does, changes nothing: the one before stays current. It comes again where the reason may pass. An evaluated version that is not
here any more is fetched and loaded beside the current one. An engine that has one version at a time keeps it instead, for a
while, when a newer one has arrived, and takes it before a newer one.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from producer.engine_contract import Adapter, AdapterFailedError, AdapterRefusedError
from producer.groups import LeaseFailure
from producer.metrics import Counters, ProducerMetrics
from producer.policies.loader import DownloadedPolicy, Loaded, PolicyLoader
from protocol.errors import REFUSED_FIX, EngineError, PolicyRefusedError
from protocol.runtime import logs
from protocol.wire.messages import PolicyInfo

logger = logging.getLogger(__name__)

_LEAST_SURVIVAL = 0.5  # of an update, below which there is a warning
_MAX_REASON = 500  # characters of it that the trainer gets


@dataclass
class SwapReport:
    counters: Counters
    metrics: ProducerMetrics
    record: Callable[..., None]  # to the timeline: the event's name and its fields
    _num_refused: int = 0  # for good, in a row
    _last_refused: int = -1
    warn: logs.Throttle = field(default_factory=partial(logs.Throttle, logger, num_at_once=1, then_every_s=3600.0))

    def note_current(self, adapter: Adapter | None) -> None:
        """Note the adapter on which requests begin from now on."""
        self.counters.policy_version = -1 if adapter is None else adapter.version
        self.counters.refused_version, self.counters.refusal, self.counters.num_refused = -1, "", 0
        self._num_refused, self._last_refused = 0, -1
        logs.bind(version=None if adapter is None else adapter.version)

    def note_live(self, downloaded: DownloadedPolicy, loaded: Loaded) -> None:
        version, swap_s = downloaded.policy.version, time.monotonic() - downloaded.announced_at
        self.counters.swaps += 1
        self.metrics.swap_s.observe(swap_s)
        self.metrics.load_s.observe(loaded.load_s)
        numbers = {"load_ms": loaded.load_s * 1000, "probe_ms": loaded.verify_s * 1000, "bytes": len(downloaded.blob)}
        numbers |= {f"{phase}_ms": seconds * 1000 for phase, seconds in loaded.phases_s.items()}
        rounded = {name: round(value, 3) for name, value in numbers.items()}
        if loaded.verdict is not None:
            self.counters.verdict = loaded.verdict
            rounded["probe_difference"] = float(f"{loaded.verdict.difference:.3g}")
        self.record("swap", version=version, ms=round(swap_s * 1000, 3), **rounded)
        fields = {"swap_ms": swap_s * 1000} | numbers
        logger.info(
            "policy v%d is live (%.0f ms after its announcement)", version, swap_s * 1000, extra={"fields": fields}
        )

    def note_survival(self, version: int, survival: dict[str, float]) -> None:
        """Note the share of a policy's update that merged weights have of it, and warn where little is left."""
        self.counters.survival = survival
        if not survival:
            return
        self.record("survival", version=version, **{name: round(share, 4) for name, share in survival.items()})
        if survival["all"] < _LEAST_SURVIVAL:
            self.warn(
                "survival",
                f"merged weights have {survival['all']:.0%} of the update of policy v{version}, because model.dtype rounds "
                "the rest away; take swap.mode: adapter, or model.dtype: float32",
            )

    def note_refused(self, version: int, reason: str, current: Adapter | None, *, may_pass: bool = False) -> None:
        counters = self.counters
        counters.failed_swaps += 1
        if not may_pass and version != self._last_refused:
            self._num_refused, self._last_refused = self._num_refused + 1, version
        counters.num_refused = 0  # the link's thread reads them at any time
        counters.refused_version, counters.refusal = version, reason[:_MAX_REASON]
        counters.num_refused = 0 if may_pass else self._num_refused
        kept = f"v{current.version} stays" if current else "no version is served yet"
        logger.error("policy v%d is refused, %s: %s", version, kept, reason)
        self.record("swap_refused", version=version, reason=reason)


_MAX_UNAVAILABLE = 16  # policies that are known not to be had; few are evaluated at a time
_ASK_AGAIN_S = 60.0  # for one of them
_AGAIN_S = (1.0, 60.0)  # before a policy that could not be taken is taken again: at first, and at most


@dataclass
class _Version:
    policy: PolicyInfo
    pins: int = 0
    outdated: list[Callable[[], None]] = field(default_factory=list)  # of its pins


@dataclass
class AdapterRegistry:
    """Registry of the adapter for new requests, and of older ones in use. `fetch` asks for a policy that is not the newest,
    and `on_fetched` answers; `take_again` has the newest one come again, through `offer`. A newer version waits `hold_s`
    for an evaluation; None: the engine has several versions at once. A group whose version is more than `max_staleness` older
    than the newest can only be stale. `run` ends with PolicyRefusedError after `max_refused` refused versions if none is
    served."""

    loader: PolicyLoader
    report: SwapReport
    fetch: Callable[[PolicyInfo], None] = lambda policy: None
    take_again: Callable[[PolicyInfo], None] = lambda policy: None
    hold_s: float | None = None
    max_staleness: float = math.inf
    max_refused: float = math.inf
    current: Adapter | None = None  # new requests start on it
    _session: int = 0
    _flipped: asyncio.Event = field(default_factory=asyncio.Event)
    _versions: dict[Adapter, _Version] = field(default_factory=dict)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _offer: DownloadedPolicy | None = None
    _fetched_policy: DownloadedPolicy | None = None
    _offered: asyncio.Event = field(default_factory=asyncio.Event)  # either of the two
    _evaluated: Adapter | None = None  # stays loaded until another one is evaluated
    _fetched: asyncio.Event = field(default_factory=asyncio.Event)
    _unavailable: deque[tuple[PolicyInfo, float]] = field(
        default_factory=partial(deque, maxlen=_MAX_UNAVAILABLE)
    )  # since
    _pause_s: float = _AGAIN_S[0]
    _again: asyncio.TimerHandle | None = None
    _in_evaluation: PolicyInfo | None = None
    _may_swap: asyncio.Event = field(default_factory=asyncio.Event)  # with `hold_s`

    @property
    def _current_policy(self) -> PolicyInfo | None:
        return self._versions[self.current].policy if self.current is not None else None

    def start_session(self, policy: PolicyInfo) -> None:
        """A new trainer process serves `policy`: a version that only its predecessor knew is no longer current."""
        self._session += 1
        self._offer = self._evaluated = None
        self.note_evaluation(None)
        self._unavailable.clear()
        self._forget_again()
        if self._current_policy != policy:
            self._flip(None)
        else:
            self.report.note_current(self.current)  # versions of the trainer before, and their refusals, are past

    def offer(self, downloaded: DownloadedPolicy) -> None:
        """Let `run` publish this version next, in place of an older one that still waits."""
        if downloaded.policy != self._current_policy:
            self._offer = downloaded
            self._offered.set()

    def on_fetched(self, policy: PolicyInfo, downloaded: DownloadedPolicy | None) -> None:
        """Take the policy that `fetch` asked for; None if it cannot be had."""
        if downloaded is None:
            self._unavailable.append((policy, time.monotonic()))
            self._tell_fetched()
        else:
            self._fetched_policy = downloaded
        self._offered.set()

    def note_evaluation(self, policy: PolicyInfo | None) -> None:
        """The trainer evaluates this one now or next, or none. Between two of its leases, too, which a producer cannot know."""
        if policy != self._in_evaluation:
            self._in_evaluation = policy
            self._offered.set()  # it may wait for the one before
        if policy is None or policy != self._current_policy:
            self._may_swap.set()
        else:
            self._may_swap.clear()

    async def wait_for(self, floor: int) -> None:
        """Returns once the current version is `floor` or newer. The caller sets the deadline."""
        while self.current is None or self.current.version < floor:
            await self._flipped.wait()

    def loaded(self, version: int) -> Adapter | None:
        """Return the adapter of this version, if the engine has it."""
        return next((adapter for adapter in self._versions if adapter.version == version), None)

    def has_newer(self, adapter: Adapter) -> bool:
        return self.current is not None and self.current.version > adapter.version

    @contextmanager
    def pin(self, adapter: Adapter | None = None, outdated: Callable[[], None] | None = None) -> Iterator[Adapter]:
        """Keep this adapter (default: the current one) loaded for the duration of the context. Call `wait_for` first. `outdated`
        is called once, when groups of this version become too old to be trained; the context should end soon then."""
        adapter = adapter or self.current
        assert adapter is not None
        version = self._versions[adapter]
        version.pins += 1
        if outdated is not None:
            version.outdated.append(outdated)
        try:
            yield adapter
        finally:
            version.pins -= 1
            if outdated in version.outdated:
                version.outdated.remove(outdated)
            self._released.set()

    @asynccontextmanager
    async def pin_evaluated(self, policy: PolicyInfo) -> AsyncIterator[Adapter]:
        """Keep the adapter of exactly this policy loaded, fetching it if needed, until another policy is evaluated. The caller
        sets the deadline. Raises LeaseFailure if it cannot be served here."""
        await self.wait_for(policy.version)
        while (adapter := self._serving(policy)) is None:
            if self.hold_s is not None:
                raise LeaseFailure(
                    "no_policy", f"v{policy.version} is evaluated, and the engine has other weights by now"
                )
            if self._is_unavailable(policy):
                raise LeaseFailure("no_policy", f"v{policy.version} is evaluated, and could not be had or loaded here")
            self.fetch(policy)
            await self._fetched.wait()
        self._evaluated = adapter
        self.note_evaluation(policy)
        with self.pin(adapter):
            yield adapter

    def _is_unavailable(self, policy: PolicyInfo) -> bool:
        now = time.monotonic()
        return any(each == policy and now - since < _ASK_AGAIN_S for each, since in self._unavailable)

    def _serving(self, policy: PolicyInfo) -> Adapter | None:
        """The adapter of this policy that a request may begin on."""
        if self.hold_s is not None:
            return self.current if self._current_policy == policy else None
        return next((adapter for adapter, version in self._versions.items() if version.policy == policy), None)

    async def run(self) -> None:
        """Publish offered versions and load fetched ones, one version at a time."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            if self._fetched_policy is not None:
                downloaded, self._fetched_policy = self._fetched_policy, None
                if self.hold_s is None:
                    await self._load_for_evaluation(downloaded)
                elif downloaded.policy == self._passed_over() and not await self.publish(downloaded):
                    self._unavailable.append((downloaded.policy, time.monotonic()))
            if self._offer is not None:
                if self.hold_s is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._may_swap.wait(), self.hold_s)
                    if (evaluated := self._passed_over()) is not None:
                        self.fetch(evaluated)
                        continue
                offer, self._offer = self._offer, None
                if offer is not None:  # else another trainer came meanwhile
                    await self.publish(offer)

    def _passed_over(self) -> PolicyInfo | None:
        """The policy that is evaluated now or next, if it lies between the current version and the offer. An engine of one
        version takes it first: later, it could not answer a prompt of that evaluation."""
        evaluated, offer = self._in_evaluation, self._offer
        if evaluated is None or offer is None or self._is_unavailable(evaluated):
            return None
        version = -1 if self.current is None else self.current.version
        return evaluated if version < evaluated.version < offer.policy.version else None

    async def publish(self, downloaded: DownloadedPolicy) -> bool:
        """Loads a version beside the running ones, verifies it and makes it current. Returns False when it was refused, or its
        trainer is gone; nothing has changed then."""
        session, policy = self._session, downloaded.policy
        try:
            loaded = await self.loader.load(downloaded)
        except AdapterFailedError as error:
            self.refuse_for_now(policy, str(error))
            return False
        except AdapterRefusedError as error:
            if session == self._session:
                self._refuse(policy.version, str(error))
            return False
        if session != self._session:
            await self.loader.discard(loaded.adapter)
            return False
        self._activate(loaded.adapter, policy)
        self._forget_again()
        self._flip(loaded.adapter)
        self._end_outdated(policy.version - self.max_staleness)
        self.report.note_live(downloaded, loaded)
        self.report.note_survival(policy.version, self.loader.weights.survival)
        await self.unload_idle()
        return True

    async def _load_for_evaluation(self, downloaded: DownloadedPolicy) -> None:
        policy = downloaded.policy
        try:
            adapter = (await self.loader.load(downloaded)).adapter
        except AdapterRefusedError as error:
            logger.error("policy v%d cannot be evaluated here: %s", policy.version, error)
            self.on_fetched(policy, None)
            return
        self._activate(adapter, policy)
        self._evaluated = adapter
        self._tell_fetched()
        await self.unload_idle()

    def _activate(self, adapter: Adapter, policy: PolicyInfo) -> None:
        """Register the adapter, after its verification: registered earlier, `unload_idle` could remove it meanwhile."""
        self.loader.weights.activate(adapter)
        self._versions[adapter] = _Version(policy)

    def _refuse(self, version: int, reason: str) -> None:
        self.report.note_refused(version, reason, self.current)
        count = self.report.counters.num_refused
        if self.current is None and count >= self.max_refused:
            raise PolicyRefusedError(
                f"no policy version is served here, and {count} in a row were refused (swap.max_refused), v{version} the last: "
                f"{reason}. {REFUSED_FIX}"
            )

    def refuse_for_now(self, policy: PolicyInfo, reason: str) -> None:
        """Report that the newest policy could not be loaded, and try it again after a pause that doubles every time."""
        again = f"{reason}; the next attempt is in {self._pause_s:g} s"
        self.report.note_refused(policy.version, again, self.current, may_pass=True)
        pause_s = self._pause_s
        self._forget_again()
        self._pause_s = min(2 * pause_s, _AGAIN_S[1])
        self._again = asyncio.get_running_loop().call_later(pause_s, self.take_again, policy)

    def _forget_again(self) -> None:
        self._pause_s = _AGAIN_S[0]
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _flip(self, adapter: Adapter | None) -> None:
        self.current = adapter
        self.note_evaluation(self._in_evaluation)
        self.report.note_current(adapter)
        self._flipped.set()
        self._flipped = asyncio.Event()

    def _end_outdated(self, oldest: float) -> None:
        for adapter, version in self._versions.items():
            if adapter.version < oldest:
                calls, version.outdated = version.outdated, []
                for outdated in calls:
                    outdated()

    def _tell_fetched(self) -> None:
        self._fetched.set()
        self._fetched = asyncio.Event()

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Around a sleep of the engine, with its gate closed: afterwards it computes the current policy as it did before. Raises
        EngineError if not."""
        adapter = self.current
        before = None if adapter is None else await self.loader.measure(adapter)
        yield
        if adapter is None or before is None:
            return
        after = await self.loader.measure(adapter)
        change = "it does not score tokens any more" if after is None else self.loader.proof.change(before, after)
        if change:
            raise EngineError(f"the engine computes otherwise than before it slept: {change}; start the producer again")

    async def unload_released(self) -> None:
        """Unload versions that requests have let go, one after the other, until it is cancelled."""
        while True:
            await self._released.wait()
            self._released.clear()
            await self.unload_idle()

    async def unload_idle(self) -> None:
        """Unload versions that are neither current, nor evaluated, nor pinned."""
        while (adapter := self._idle()) is not None:  # looked for again after every wait: others pin meanwhile
            del self._versions[adapter]
            await self.loader.discard(adapter)

    def _idle(self) -> Adapter | None:
        kept = (self.current, self._evaluated)
        idle = (one for one, version in self._versions.items() if version.pins == 0 and one not in kept)
        return next(idle, None)
