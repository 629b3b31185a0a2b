"""Policies as the weights of vLLM: LoRA adapters beside each other (`swap.mode: adapter`), or one adapter, merged into its own
weights (`swap.mode: merged`).

Guarantee: a request runs on the adapter that it names, to its end; an adapter id names the same weights while the engine lives.
With exchanged weights every token is stamped with the version that sampled it, by the workers' own count at the flip. They wait
for verification until they are activated: meanwhile no request begins, and those in flight are not handed out. When they are
discarded instead, the former weights come back, bit for bit, and requests in flight begin anew. No request finds KV that other
weights computed before it began.

    settled --load--> pending verification --activate--> settled
                         |
                         +------discard---> settled, with the former weights
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from producer.engine.exchange_worker import completion_of
from producer.engine_contract import Adapter, AdapterFailedError, AdapterRefusedError, Rows, Scored
from protocol.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from producer.engine.core import EngineCore
    from producer.engine.exchange_worker import Survival

Generate = Callable[[str, Any, str], Awaitable[Any]]
"""Runs a request of vLLM, given its id, its LoRARequest or None, and a salt: requests share KV with those of the same salt."""

_POLL_S = (0.005, 0.05)  # the first pause, and the longest


@dataclass(eq=False)
class InFlightRequest:
    """A group in the engine: the version that it began on, and each flip since."""

    version: int
    flips: list[tuple[int, dict[int, int]]] = field(default_factory=list)  # to a version; tokens that completions had
    invalidated: bool = False
    task: "asyncio.Task[Any] | None" = None

    def token_versions(self, index: int, num_tokens: int) -> list[int]:
        """Return the policy version of each token of completion `index`. A completion that the workers did not know at a flip had
        no tokens yet."""
        versions: list[int] = []
        version = self.version
        for next_version, counts in self.flips:
            versions += [version] * (min(counts.get(index, 0), num_tokens) - len(versions))
            version = next_version
        return versions + [version] * (num_tokens - len(versions))


async def prepare(core: "EngineCore", what: str, *arguments: Any, path: str = "") -> None:
    """Call `what`_prepare of the workers, and wait until `what`_state is "running" on none. Raises AdapterRefusedError if one
    refuses, or is done with something else than the adapter at `path`, AdapterFailedError if one has failed."""
    await core.call_workers(f"{what}_prepare", *arguments)
    await settled(core, what, path)


async def settled(core: "EngineCore", what: str, path: str) -> None:
    """Wait until `what`_state is "running" on no worker. Raises as `prepare` does."""
    pause_s, longest_s = _POLL_S
    while "running" in dict(states := await core.call_workers(f"{what}_state")):
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    errors = dict(states)
    if "refused" in errors:
        raise AdapterRefusedError(errors["refused"])
    if "failed" in errors:
        raise AdapterFailedError(errors["failed"])
    if others := [number for number, (_, done) in enumerate(states) if done != path]:
        raise AdapterRefusedError(f"the policy did not reach worker {others[0]} of the engine's {len(states)}")


def shares_of(workers: "list[Survival]") -> dict[str, float]:
    """Return the share of the update that is left, by the last part of modules' names and of `all`, over all workers. It is
    absent where there is no update."""
    left: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    for sums in workers:
        for module, (its_left, its_whole) in sums.items():
            for name in (module, "all"):
                left[name] += its_left
                whole[name] += its_whole
    return {name: left[name] / whole[name] for name in sorted(whole) if whole[name] > 0}


@dataclass
class AdapterWeights:
    """`PolicyWeights` that hold several versions, each as a LoRA adapter."""

    core: "EngineCore"
    lora_request: Callable[[Adapter], Any]
    holds_versions: bool = True
    survival: dict[str, float] = field(default_factory=dict)  # nothing is rounded
    loaded_ids: set[int] = field(default_factory=set)
    _request_ids: Iterator[int] = field(default_factory=itertools.count)

    async def start(self) -> None:
        await self.core.call_workers("loading_start")

    async def load(self, adapter: Adapter) -> None:
        assert adapter.id not in self.loaded_ids, "vLLM would go on serving the weights that it knows under this id"
        try:
            path = str(adapter.path)
            await prepare(self.core, "loading", (adapter.name, adapter.id, path), adapter.checksum, path=path)
        except AdapterRefusedError:
            await self.core.call_workers("remove_lora", adapter.id)  # another worker may have it
            raise
        self.loaded_ids.add(adapter.id)

    async def verify(self, adapter: Adapter | None, rows: Rows) -> list[Scored]:
        lora = None if adapter is None else self.lora_request(adapter)
        return await self.core.verify(rows, lora, "", is_base=adapter is None)

    def activate(self, adapter: Adapter) -> None:
        """Do nothing: a request may name an adapter as soon as it is loaded."""

    async def discard(self, adapter: Adapter) -> None:
        """Unload an adapter that no request names; vLLM would read it again for one, or die."""
        await self.core.call_workers("remove_lora", adapter.id)
        self.loaded_ids.remove(adapter.id)

    async def sample(self, generate: Generate, adapter: Adapter) -> tuple[Any, InFlightRequest]:
        output = await generate(f"group-{next(self._request_ids)}", self.lora_request(adapter), "")
        return output, InFlightRequest(adapter.version)


@dataclass
class MergedWeights:
    """`PolicyWeights` that hold one version at a time, in the engine's own weights: an adapter that is merged into them, or a
    patch of them."""

    core: "EngineCore"
    holds_versions: bool = False
    survival: dict[str, float] = field(default_factory=dict)
    _present: Adapter | None = None
    _former: Adapter | None = None
    _num_flips: int = 0
    _request_ids: Iterator[int] = field(default_factory=itertools.count)
    _in_flight: dict[str, InFlightRequest] = field(default_factory=dict)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._settled.set()

    async def start(self) -> None:
        """Raise ConfigError if a worker's weights are not the checkpoint's, so that no patch could be applied to them."""
        if reason := next(filter(None, await self.core.call_workers("weights_start")), None):
            raise ConfigError(
                f"policies as patches cannot be used here: {reason}; train an adapter that vLLM serves (remove `lora: null`, or "
                "the keys of `lora` for which the trainer merges)"
            )

    async def load(self, adapter: Adapter) -> dict[str, float]:
        """Make the engine's weights those of this policy. They wait for verification."""
        path, times = str(adapter.path), [time.monotonic()]
        await prepare(self.core, "weights", path, adapter.checksum, path=path)
        times.append(time.monotonic())
        self._settled.clear()
        await self._flip(adapter)
        times.append(time.monotonic())
        try:
            await self._prove(path)
        except AdapterRefusedError:
            await self.discard(adapter)
            raise
        times.append(time.monotonic())
        phases = zip(("prepare", "flip", "bits"), itertools.pairwise(times), strict=True)
        return {name: ended - began for name, (began, ended) in phases}

    async def verify(self, adapter: Adapter | None, rows: Rows) -> list[Scored]:
        if adapter is None and self._present is not None:
            raise AdapterRefusedError("the engine has a policy in place of its base")
        return await self.core.verify(rows, None, self.salt, is_base=adapter is None)

    def activate(self, adapter: Adapter) -> None:
        assert adapter is self._present
        self._settled.set()

    async def discard(self, adapter: Adapter) -> None:
        """Take this policy back if it waits for verification; otherwise its weights are gone already. Raises EngineError if the
        former weights cannot come back."""
        if self._settled.is_set() or adapter is not self._present:
            return
        try:
            await prepare(self.core, "weights", None, None)
            await self._flip(self._former)
            await self._prove("")
        except AdapterRefusedError as error:
            raise EngineError(
                f"the engine has weights that were refused, and cannot take back the former ones: {error}; start the producer "
                "again, with more memory if that is the reason"
            ) from error
        for request in self._in_flight.values():
            request.invalidated = True
            if request.task is not None:
                request.task.cancel()
        self._settled.set()

    def lora_request(self, adapter: Adapter) -> None:
        """Return None: the policy is in the engine's own weights."""

    async def sample(self, generate: Generate, adapter: Adapter) -> tuple[Any, InFlightRequest]:
        """Sample on the present weights and on their replacements meanwhile, never on weights that are discarded."""
        while True:
            await self._settled.wait()
            assert self._present is not None
            group = f"group-{next(self._request_ids)}"
            request = self._in_flight[group] = InFlightRequest(self._present.version)
            request.task = asyncio.ensure_future(generate(group, None, self.salt))
            try:
                output = await request.task
                await self._settled.wait()
                if not request.invalidated:
                    return output, request
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not request.invalidated or (task is not None and task.cancelling()):
                    raise
            finally:
                request.task.cancel()
                del self._in_flight[group]

    @property
    def salt(self) -> str:
        """The salt of KV that the present weights computed."""
        return f"weights-{self._num_flips}"

    async def _prove(self, path: str) -> None:
        await self.core.call_workers("weights_prove")
        await settled(self.core, "weights", path)
        self.survival = shares_of(await self.core.call_workers("weights_survival"))

    async def _flip(self, adapter: Adapter | None) -> None:
        counts = (await self.core.call_workers("weights_flip"))[0]
        self._former, self._present = self._present, adapter
        self._num_flips += 1
        by_group: dict[str, dict[int, int]] = {}
        for request, count in counts.items():
            if completion := completion_of(request):
                by_group.setdefault(completion[0], {})[completion[1]] = count
        if adapter is None:
            return  # back before the first policy, when no group can be in flight
        for group, request in self._in_flight.items():
            request.flips.append((adapter.version, by_group.get(group, {})))


VllmWeights = AdapterWeights | MergedWeights
"""The policies that requests of this engine run on. `sample` returns the output of `generate` for a group, and the versions that
sampled it; `start` prepares the workers, once, before the first request."""
