"""A group's way through the engine, and through the swaps that come meanwhile (`swap.in_flight`).

Guarantee: as many completions come out as were asked for, none longer than asked; each token has its log-prob and the version
that sampled it, and versions never decrease along a completion. An adapter is pinned while a request names it, and the former
one until the next is, so that a group never waits for a policy in between. However fast policies follow each other, a group
ends:

- `finish`: it stays on its adapter.
- `continue`: its requests are cut. Completions that had ended stay as they are; the others go on as requests of their own, from
  prompt and tokens, whose KV is computed anew under the new adapter. That is to stay cheap beside what is sampled, so a group
  is not cut again before its time in the engine has doubled: at any pace of swaps about two tokens at most are computed again
  for each that is sampled, and segments grow until every completion gets ahead.
- `restart`: its tokens are dropped, once. If it outlives a second swap, it takes longer than there is time between two.

The end of a turn on a shared GPU cuts a group where a swap would, and any group that stays longer than it may. It goes on after
the turn with its tokens, on the adapter that it has, unless a newer one is there and the mode says otherwise. One that cannot be
continued (`sampling.stop`, guided decoding) is only cut when it stays too long, and begins again.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from producer.engine_contract import Adapter, Completion, Engine
from producer.engine_gate import EngineGate
from producer.metrics import Counters
from producer.policies.registry import AdapterRegistry
from protocol.wire.messages import Sampling

OnSwap = Literal["finish", "continue", "restart"]
Sample = Callable[[list[int], Sampling], Awaitable[list[Completion]]]
OnOutdated = Callable[[], None]
_Request = tuple[list[int], Sampling]


@dataclass
class BusyClock:
    """Time during which at least one request is in the engine."""

    _active: int = 0
    _since: float = 0.0
    _total_s: float = 0.0

    def busy_s(self) -> float:
        return self._total_s + (time.monotonic() - self._since if self._active else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._active == 0:
            self._since = time.monotonic()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._total_s += time.monotonic() - self._since


@dataclass
class InFlight:
    """Takes groups through the engine. `busy` runs while one is there."""

    engine: Engine
    adapters: AdapterRegistry
    counters: Counters
    on_swap: OnSwap
    clock: Callable[[], float] = time.monotonic
    busy: BusyClock = field(default_factory=BusyClock)
    gate: EngineGate = field(default_factory=EngineGate)

    def __post_init__(self) -> None:
        self._keeps_weights = self.engine.capabilities.holds_versions
        if self.on_swap == "continue" and not self._keeps_weights:
            self.on_swap = "finish"  # where the engine's own weights change, a group goes on by itself, without a cut

    @contextmanager
    def pin_for_group(self, outdated: OnOutdated | None = None) -> Iterator[Adapter | None]:
        """Pin one adapter for all turns of a group (`in_flight: finish`); yields None if every turn uses the newest. Call
        `AdapterRegistry.wait_for` first; `outdated` as in `AdapterRegistry.pin`."""
        if self.on_swap != "finish" or not self._keeps_weights:
            yield None
            return
        with self.adapters.pin(outdated=outdated) as adapter:
            yield adapter

    async def sample(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        kept: Adapter | None = None,
        outdated: OnOutdated | None = None,
    ) -> list[Completion]:
        """Sample one group, on the adapter `kept`, which the caller pins, or (None) from the current one on, but only after
        `AdapterRegistry.wait_for`; `outdated` as in `AdapterRegistry.pin`. Where the engine's own weights change meanwhile,
        tokens say so. Raises LeaseFailure where the engine refuses a request."""
        stays = kept is not None or self.on_swap == "finish"
        continues, may_restart = (mode == self.on_swap and not stays for mode in ("continue", "restart"))
        await self.gate.wait_open()
        if kept is None:
            await self.adapters.wait_for(0)  # another trainer may have come meanwhile
        began = self.clock()
        with ExitStack() as pins:
            adapter = kept or pins.enter_context(self.adapters.pin(outdated=outdated))
            whole = [(prompt_ids, sampling)]
            completions = await self._sample_segment(whole, adapter, min_run_s=math.inf if stays else 0.0)
            while places := [place for place, completion in enumerate(completions) if completion.cut]:
                if not self.gate.is_open:
                    cut_at = self.clock()
                    await self.gate.wait_open()
                    began += self.clock() - cut_at
                # Not so at the end of a turn, or when the newer one went because another trainer came.
                is_superseded = (continues or may_restart) and self.adapters.has_newer(adapter)
                if is_superseded:
                    with pins.pop_all():
                        adapter = pins.enter_context(self.adapters.pin(outdated=outdated))
                if (may_restart and is_superseded) or not _can_be_continued(sampling):
                    may_restart &= not is_superseded
                    self.counters.restarted += 1
                    self.counters.dropped_tokens += sum(len(completion.token_ids) for completion in completions)
                    completions = await self._sample_segment(whole, adapter, 0.0 if may_restart else math.inf)
                    continue
                self.counters.cut += len(places)
                requests = [_rest(prompt_ids, sampling, completions[place].token_ids) for place in places]
                min_run_s = self.clock() - began if continues else 0.0 if may_restart else math.inf
                partials = await self._sample_segment(requests, adapter, min_run_s)
                for place, partial in zip(places, partials, strict=True):
                    completions[place] = _joined(completions[place], partial)
        return completions

    async def score(self, token_ids: list[int], version: int) -> list[float]:
        """Return the log-prob of each of these tokens but the first, at temperature 1, on this policy version, or on the current
        one if that is gone. Raises LeaseFailure where the engine refuses."""
        await self.gate.wait_open()
        await self.adapters.wait_for(0)
        with self.adapters.pin(self.adapters.loaded(version)) as adapter:
            async with self.gate.use():
                with self.busy.running():
                    return await self.engine.score(token_ids, adapter)

    async def _sample_segment(self, requests: list[_Request], adapter: Adapter, min_run_s: float) -> list[Completion]:
        """Sample `requests` until they end or, after `min_run_s`, a newer adapter is current or the turn on the GPU ends."""
        cut = asyncio.Event()
        gains = all(_can_be_continued(sampling) for _, sampling in requests)  # by a cut at the end of a turn
        async with self.gate.use(cut.set, min_run_s if gains else math.inf):
            with self.busy.running():
                return await self._sample_until(cut, requests, adapter, min_run_s)

    async def _sample_until(
        self, cut: asyncio.Event, requests: list[_Request], adapter: Adapter, min_run_s: float
    ) -> list[Completion]:
        samplers = [asyncio.create_task(self.engine.generate(*request, adapter, cut)) for request in requests]
        tasks: list[asyncio.Task[Any]] = [*samplers]
        if min_run_s < math.inf:
            tasks.append(asyncio.create_task(self._cut_when_superseded(adapter, cut, min_run_s)))
        try:
            groups = await asyncio.gather(*samplers)
        finally:  # no request may outlive the pin
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [partial for partials in groups for partial in partials]

    async def _cut_when_superseded(self, adapter: Adapter, cut: asyncio.Event, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.adapters.wait_for(adapter.version + 1)
        cut.set()


def _can_be_continued(sampling: Sampling) -> bool:
    """Return True if no stop text or grammar could span a cut."""
    return not (sampling.stop or sampling.regex or sampling.json_schema)


def _rest(prompt_ids: list[int], sampling: Sampling, token_ids: list[int]) -> _Request:
    num_left = sampling.max_completion_length - len(token_ids)
    return prompt_ids + token_ids, msgspec.structs.replace(sampling, num_generations=1, max_completion_length=num_left)


def _joined(completion: Completion, partial: Completion) -> Completion:
    return Completion(
        completion.token_ids + partial.token_ids,
        completion.logprobs + partial.logprobs,
        partial.truncated,
        completion.token_versions + partial.token_versions,
        partial.cut,
    )
