"""Environments of Atropos: they ask for the number of groups that the run wants, and post groups to be trained.

Guarantee: every posted group is queued for one lease, refused with a reason, or has to be posted again later. A group that is
posted twice is trained once. Which tokens are trained is decided in `scored_data.py`. Queues, records and lists are bounded.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from producer.groups import LeaseFailure, Rollouts
from producer.rollouts.engine_access import EngineAccess, Progress
from protocol.config.run import RunConfig
from protocol.runtime.logs import Throttle
from protocol.runtime.metrics import Readings
from protocol.wire.messages import Lease
from slipstream_extras.endpoint.agents import first_difference, sampled_as
from slipstream_extras.endpoint.atropos.bodies import Registration, generate_body, parse_generate, unzip
from slipstream_extras.endpoint.atropos.recorded import RecordedCalls
from slipstream_extras.endpoint.atropos.scored_data import ScoredData, ScoredGroups, match_group
from slipstream_extras.endpoint.openai import (
    Generating,
    Recorder,
    RefusedError,
    Sampled,
    ServedRequest,
    decode_body,
    malformed,
    parse_object,
)

logger = logging.getLogger(__name__)

_PREFIX = "/atropos"
_REMEMBERED_GROUPS = 4096  # to know those that are posted again
_BYTES_PER_TOKEN = 128  # of a group as JSON: token, mask, log-prob, messages
_MAX_ENVIRONMENTS = 256
_HEARD_S = 60.0  # environments ask for the status ten times a second
_MARGIN = 0.05  # of a lease's time, for delivery
_MIN_SHARE = 0.01  # as Atropos has it


class QueueFullError(Exception):
    """Raised when no lease waits for a group and the queue is full."""


class GroupQueue:
    """Matches groups that wait for a lease with leases that wait for a group.

    A group goes to one lease, whose floor is not above the policy that sampled it; among several leases, to the one that has
    waited longest. The number of groups is bounded. A group that is too old for every waiting lease is stale. `leased`,
    `stale` and `void` count the outcomes of offered groups.
    """

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: deque[Rollouts] = deque()
        self._floors: list[int] = []  # of waiting leases
        self._changed = asyncio.Event()
        self._trainers = 1  # trainer processes that have given leases
        self.leased = self.stale = self.void = 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_leases(self) -> int:
        return len(self._floors)

    @property
    def floor(self) -> int:
        """The oldest policy that a waiting lease accepts; 0 if no lease waits."""
        return min(self._floors, default=0)

    def offer(self, group: Rollouts) -> None:
        """Queue a group. Raise QueueFullError, without any change, if there is no room now."""
        if len(self._groups) >= self._max_groups + len(self._floors):
            raise QueueFullError
        self._groups.append(group)
        self.drop_older(self.floor)
        self._changed.set()

    async def take(self, floor: int) -> Rollouts:
        """Return the group that has waited longest among those that are not older than `floor`."""
        trainer = self._trainers
        self._floors.append(floor)
        try:
            while trainer == self._trainers:
                for place, group in enumerate(self._groups):
                    if group.policy_version >= floor:
                        del self._groups[place]
                        self.leased += 1
                        return group
                self.drop_older(self.floor)
                self._changed.clear()
                await self._changed.wait()
            raise LeaseFailure("returned", "the trainer is another process now")
        finally:
            if trainer == self._trainers:
                self._floors.remove(floor)

    def drop_older(self, version: int) -> None:
        """Drop groups of older policies, which no lease will accept."""
        kept = [group for group in self._groups if group.policy_version >= version]
        self.stale += len(self._groups) - len(kept)
        self._groups = deque(kept)

    def forget(self) -> None:
        """Drop all groups and return the leases, because versions now mean other weights."""
        self._trainers += 1
        self.void += len(self._groups)
        self._groups.clear()
        self._floors.clear()
        self._changed.set()


@dataclass
class _Environment:
    weight: float
    heard_at: float


class Environments:
    """The environments that have registered, and their shares of the engine.

    A share is the weight among environments that asked lately, so one that died, which is reported to no one, does not keep its
    share. At most 256 are known; beyond that, the one that was silent for longest is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._known: dict[int, _Environment] = {}

    def add(self, registration: Registration) -> int:
        """Register an environment and return its number."""
        if len(self._known) >= _MAX_ENVIRONMENTS:
            del self._known[min(self._known, key=lambda number: self._known[number].heard_at)]
        number = next(self._numbers)
        weight = max(0.0, registration.weight) * max(0.0, registration.max_token_length)
        self._known[number] = _Environment(weight, self._clock())
        return number

    def remove(self, number: Any) -> bool:
        """Forget an environment. Return whether it was known."""
        return type(number) is int and self._known.pop(number, None) is not None

    def share_of(self, number: Any) -> float:
        """Return a share from 0.01 to 1. An unknown environment has outlived a producer, and is not restrained."""
        mine = self._known.get(number) if type(number) is int else None
        if mine is None:
            return 1.0
        now = mine.heard_at = self._clock()
        total = sum(each.weight for each in self._known.values() if now - each.heard_at <= _HEARD_S)
        return max(_MIN_SHARE, mine.weight / total) if total else 1.0


class Atropos:
    """The rollout server of Atropos for one run. The engine takes sequences of `max_model_len` tokens and has the policy
    `version`, -1 while there is none."""

    def __init__(self, config: RunConfig, max_model_len: int, version: Callable[[], int]) -> None:
        values = config.sampling
        self.sampling = values.message
        self.max_body_bytes = max(
            config.serve.max_request_bytes, _BYTES_PER_TOKEN * values.num_generations * max_model_len
        )
        self._max_staleness = config.pipeline.max_staleness
        # An environment leaves when step and queue together pass the number of steps. Groups in the queue may have no signal.
        self._num_steps = int(config.trainer["max_steps"]) + 2 * (self._max_staleness + 1)
        self._budget = (self._max_staleness + 1) * config.pipeline.groups_per_step
        self.info = {"batch_size": config.completions_per_step, "max_token_len": max_model_len}
        self._takes_advantages = config.rewards.credit == "given"
        self.names = {"group": Path(config.run_dir).name, "project": "slipstream"}
        self._version = version
        self.calls = RecordedCalls()
        self.queue = GroupQueue(self._budget)
        self._environments = Environments()
        self._known: dict[str, None] = {}  # groups, the oldest first
        self._unrecorded_reason = ""  # of the last call that was not recorded
        self._posted: Counter[str] = Counter()
        self._warn = Throttle(logger)

    @property
    def is_ready(self) -> bool:
        """Return True once the engine has a policy."""
        return self._version() >= 0

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of posted groups by outcome; those in the queue are not decided."""
        answered = {name: self._posted[name] for name in ("duplicate", "refused", "busy")}
        return {"leased": self.queue.leased, "stale": self.queue.stale, "void": self.queue.void} | answered

    # The endpoint's side

    prefix = _PREFIX

    def routes(self, generating: Generating) -> list[Route]:
        """Return the API below `/atropos`, as far as environments use it (docs/environments.md)."""

        def route(
            method: str, name: str, answer: Callable[[Any], dict[str, Any]], read: Callable[[bytes], Any] = bytes
        ) -> Route:
            async def respond(request: Request) -> JSONResponse:
                body, is_packed = await request.body(), "gzip" in request.headers.get("content-encoding", "").lower()
                if is_packed:
                    body = await asyncio.to_thread(unzip, body, self.max_body_bytes)
                return JSONResponse(answer(await asyncio.to_thread(read, body)))

            return Route(f"{_PREFIX}/{name}", respond, methods=[method])

        async def health(_: Request) -> JSONResponse:
            return JSONResponse({}, 200 if self.is_ready else 503)

        def register(body: bytes) -> dict[str, Any]:
            return self.register(decode_body(body, Registration, "the registration of an environment of Atropos"))

        def one(body: bytes) -> list[ScoredData]:
            return [decode_body(body, ScoredData, "the scored data of Atropos")]

        def several(body: bytes) -> list[ScoredData]:
            return decode_body(body, ScoredGroups, "the scored data of Atropos")

        return [
            route("POST", "register-env", register),
            route("POST", "disconnect-env", lambda body: self.disconnect(parse_object(body).get("env_id"))),
            route("POST", "scored_data", self.post, one),
            route("POST", "scored_data_list", self.post, several),
            route("GET", "wandb_info", lambda _: self.names),
            route("GET", "info", lambda _: self.info),
            route("GET", "status", lambda _: self.status()),
            route("GET", "status-env", lambda body: self.status(parse_object(body).get("env_id"))),
            Route(f"{_PREFIX}/health", health),
            generating(f"{_PREFIX}/generate", parse_generate, generate_body),
        ]

    def rollouts(self, access: EngineAccess, reward_names: tuple[str, ...]) -> "AtroposRollouts":
        return AtroposRollouts(self, access, reward_names)

    def watch(self, readings: Readings) -> None:
        readings.counters(
            "rl_producer_atropos_groups_total",
            "Groups posted (environment.agent=atropos).",
            "outcome",
            lambda: self.outcomes,
        )
        readings.gauges(
            "rl_producer_atropos_queue",
            "Groups that wait for a lease, and leases that wait for a group.",
            "waiting",
            lambda: {"groups": self.queue.num_groups, "leases": self.queue.num_leases},
        )
        readings.gauge(
            "rl_producer_atropos_recorded_bytes",
            "Bytes of sampled calls that are not scored yet.",
            lambda: self.calls.num_bytes,
        )
        readings.counter(
            "rl_producer_atropos_evicted_total",
            "Calls forgotten to make room before they were scored.",
            lambda: self.calls.evicted,
        )

    # Calls

    @property
    def floor(self) -> int:
        """The oldest policy that a waiting lease accepts."""
        return self.queue.floor

    def prepare(self, request: ServedRequest) -> tuple[Recorder | None, ServedRequest]:
        """Return the recorder of this request, if it may be trained, and the request, then with the run's sampling."""
        name = "model" if request.model != "policy" else first_difference(request, self.sampling)
        if name is None:
            return self, sampled_as(request, self.sampling)
        asked = request.model if name == "model" else request.fields.get(name)
        self._unrecorded_reason = f"; the last call that was not recorded asked for {name}={asked!r:.40}"
        return None, request

    def note(self, sampled: Sampled) -> None:
        self.calls.note(sampled)

    # Environments

    def register(self, registration: Registration) -> dict[str, Any]:
        """Register an environment. Raise RefusedError if it is set up for another run."""
        if not self.is_ready:
            return {"status": "wait for trainer to start"}
        if registration.group_size != self.sampling.num_generations:
            raise malformed(
                f"groups of this run have sampling.num_generations={self.sampling.num_generations} sequences; give the "
                f"environment --env.group_size {self.sampling.num_generations}",
                "group_size",
            )
        if registration.min_batch_allocation is not None:
            raise malformed("groups are trained as they come; leave min_batch_allocation out", "min_batch_allocation")
        number = self._environments.add(registration)
        name = f"{(registration.desired_name or 'environment')[:80]}_{number}"
        logger.info("environment %r of Atropos has registered", name)
        return {
            "status": "success",
            "env_id": number,
            "wandb_name": name,
            "checkpoint_dir": "",
            "starting_step": self._step,
            "checkpoint_interval": -1,
            "num_steps": self._num_steps,
        }

    def disconnect(self, env_id: Any) -> dict[str, Any]:
        known = self._environments.remove(env_id)
        return {"status": "success"} if known else {"status": "failure", "error": "no such environment"}

    def status(self, env_id: Any = None) -> dict[str, Any]:
        """Return the step, and the number of groups that the trainer may have and has not trained or that wait for a lease."""
        self._drop_stale()
        ready = max(0, self._budget - self.queue.num_leases) + self.queue.num_groups
        return {
            "current_step": self._step,
            "queue_size": ready,
            "self_queue_size": ready,
            "unallocated_fraction": 1.0,
            "max_group_size": self.sampling.num_generations,
            "env_weight": self._environments.share_of(env_id),
        }

    def post(self, groups: list[ScoredData]) -> dict[str, Any]:
        """Queue groups. Raise RefusedError if one is refused, or there is no room for it; others may have been accepted."""
        self._drop_stale()
        refusals: list[RefusedError] = []
        for group in groups:
            try:
                self._accept(group)
            except QueueFullError:
                self._posted["busy"] += 1
                why = "the trainer has more groups than it can use; post again in a few seconds"
                raise RefusedError(503, "busy", why) from None
            except RefusedError as error:
                refusals.append(error)
        if refusals:
            self._posted["refused"] += len(refusals)
            self._warn("refused", f"{len(refusals)} groups of an environment of Atropos are refused: {refusals[0]}")
            raise refusals[0]
        return {"status": "received", "groups_processed": len(groups)}

    def _accept(self, data: ScoredData) -> None:
        digest = hashlib.sha256(msgspec.json.encode(data.tokens)).hexdigest()
        try:
            rollouts, calls = match_group(
                data, self.calls, self.sampling, now=time.monotonic(), takes_advantages=self._takes_advantages
            )
        except RefusedError as error:
            if digest in self._known:
                self._posted["duplicate"] += 1
                return
            if error.reason == "not_sampled":
                raise RefusedError(error.status, error.reason, f"{error}{self._unrecorded_reason}") from None
            raise
        self.queue.offer(rollouts)
        self.calls.remove(calls)
        self._known[digest] = None
        if len(self._known) > _REMEMBERED_GROUPS:
            del self._known[next(iter(self._known))]

    # Leases

    async def fulfil(self, floor: int) -> Rollouts:
        """Wait for the group of a lease and return it."""
        self._drop_stale()
        return await self.queue.take(floor)

    def forget(self) -> None:
        """Forget groups and calls, because versions of another trainer process may mean other weights."""
        self.queue.forget()
        self.calls.forget()

    @property
    def _step(self) -> int:
        return max(0, self._version())

    def _drop_stale(self) -> None:
        self.queue.drop_older(self._version() - self._max_staleness)


@dataclass
class AtroposRollouts:
    """The `RolloutSource` of a run with Atropos. `reward_names` are the posted scores. A lease goes back to the trainer if no
    group was posted in its time."""

    atropos: Atropos
    access: EngineAccess
    reward_names: tuple[str, ...]

    async def generate(self, lease: Lease, progress: Progress) -> Rollouts:
        if lease.sampling != self.atropos.sampling:
            raise LeaseFailure(
                "generation_failed", "trainer and producer have different `sampling:`; give both one file"
            )
        try:
            async with asyncio.timeout(lease.timeout_s * (1 - _MARGIN)):
                await self.access.wait_for(lease.policy_floor)
                progress.enter("with agents", "generation_failed")
                return await self.atropos.fulfil(lease.policy_floor)
        except TimeoutError:
            raise LeaseFailure("returned", "no environment posted a group") from None
