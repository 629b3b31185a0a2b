"""Environments of Atropos (`environment.atropos`): they ask how many groups are wanted, and post groups to be trained.

Guarantee: every group that is posted is queued for one lease, refused with a reason, or to be posted again later. A group that is
posted twice is trained once. `producer.environments.scored_data` decides what of it is trained. Queues, records and lists are
bounded.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from producer.endpoint.agents import first_difference, sampled_as
from producer.endpoint.openai import RefusedError, Sampled, ServedRequest, malformed
from producer.endpoint.recorded import RecordedCalls
from producer.environments.group_queue import GroupQueue, QueueFullError
from producer.environments.registrations import Environments, Registration
from producer.environments.scored_data import ScoredData, match_group
from producer.groups import Rollouts
from protocol.config.run import RunConfig
from protocol.runtime.logs import Throttle

logger = logging.getLogger(__name__)

_REMEMBERED_GROUPS = 4096  # to know those that are posted again
_BYTES_PER_TOKEN = 128  # of a group as JSON: token, mask, log-prob, messages


class Atropos:
    """See the module's guarantee. The engine takes sequences of `max_model_len` tokens and has the policy `version`, -1 while
    there is none."""

    def __init__(self, config: RunConfig, max_model_len: int, version: Callable[[], int]) -> None:
        values = config.sampling
        self.sampling = values.message
        self.max_body_bytes = max(
            config.serve.max_request_bytes, _BYTES_PER_TOKEN * values.num_generations * max_model_len
        )
        self._max_staleness = config.pipeline.max_staleness
        # An environment leaves when step and queue together pass the number of steps. What is in the queue may have no signal.
        self._num_steps = int(config.trainer["max_steps"]) + 2 * (self._max_staleness + 1)
        self._budget = (self._max_staleness + 1) * config.pipeline.groups_per_step
        self.info = {"batch_size": config.completions_per_step, "max_token_len": max_model_len}
        self.names = {"group": Path(config.run_dir).name, "project": "slipstream"}
        self._version = version
        self.calls = RecordedCalls()
        self.queue = GroupQueue(self._budget)
        self._environments = Environments()
        self._known: dict[str, None] = {}  # groups, the oldest first
        self._unlike = ""  # why the last call that was not recorded was not
        self._posted: Counter[str] = Counter()
        self._warn = Throttle(logger)

    @property
    def is_ready(self) -> bool:
        """Whether the engine has a policy."""
        return self._version() >= 0

    @property
    def outcomes(self) -> dict[str, int]:
        """Counts the posted groups by what became of them; those in the queue are not decided."""
        answered = {name: self._posted[name] for name in ("duplicate", "refused", "busy")}
        return {"leased": self.queue.leased, "stale": self.queue.stale, "void": self.queue.void} | answered

    # Calls

    @property
    def floor(self) -> int:
        """The oldest policy that a waiting lease takes."""
        return self.queue.floor

    def prepare(self, request: ServedRequest) -> tuple["Atropos | None", ServedRequest]:
        """Returns what records the samples of this request, if anything; and the request, sampled as the run is if it may be
        trained."""
        name = "model" if request.model != "policy" else first_difference(request, self.sampling)
        if name is None:
            return self, sampled_as(request, self.sampling)
        asked = request.model if name == "model" else request.fields.get(name)
        self._unlike = f"; the last call that was not recorded asked for {name}={asked!r:.40}"
        return None, request

    def note(self, sampled: Sampled) -> None:
        self.calls.note(sampled)

    # Environments

    def register(self, registration: Registration) -> dict[str, Any]:
        """Raises RefusedError if the environment is set up for another run."""
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
        """Counts what the trainer may have and has not trained, and what waits for a lease."""
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
        """Raises RefusedError if a group is refused, or there is no room for it. Other groups may be accepted all the
        same."""
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
            rollouts, calls = match_group(data, self.calls, self.sampling, now=time.monotonic())
        except RefusedError as error:
            if digest in self._known:
                self._posted["duplicate"] += 1
                return
            if error.reason == "not_sampled":
                raise RefusedError(error.status, error.reason, f"{error}{self._unlike}") from None
            raise
        self.queue.offer(rollouts)
        self.calls.remove(calls)
        self._known[digest] = None
        if len(self._known) > _REMEMBERED_GROUPS:
            del self._known[next(iter(self._known))]

    # Leases

    async def fulfil(self, floor: int) -> Rollouts:
        """The group of a lease."""
        self._drop_stale()
        return await self.queue.take(floor)

    def forget(self) -> None:
        """Is called for another trainer process, whose versions may mean other weights."""
        self.queue.forget()
        self.calls.forget()

    @property
    def _step(self) -> int:
        return max(0, self._version())

    def _drop_stale(self) -> None:
        self.queue.drop_older(self._version() - self._max_staleness)
