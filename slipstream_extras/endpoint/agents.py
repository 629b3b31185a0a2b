"""Leases that outside agents fulfil over HTTP, in a run with posted rewards.

Guarantee: a task is handed to one agent, once. Every token that the policy sampled for its answered calls, and nothing else,
becomes the lease's group, behind exactly the tokens that it saw, and every call is sampled as the run is. Posted rewards of spans
lie on their tokens, by `producer.rewards.spans`. The group is made as
soon as every episode has its rewards or has failed, or else shortly before the lease ends, without the rewards that are missing
then. A lease whose task no agent took goes back to the trainer; a task that an agent left without a completion fails. Posts for
an episode that is over change nothing.

    waiting --take--> taken --rewards of all episodes--> scored --> answered
       |                |
       |                +-- an episode failed without a completion: failed
       +-- its time is over: returned     +-- its time is over: answered without the missing rewards, or failed
"""

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from producer.engine_contract import Completion
from producer.groups import Episode, LeaseFailure, Record
from producer.rewards.spans import Spans, finite
from protocol.errors import UNSENDABLE
from protocol.wire.messages import Lease, Sampling
from slipstream_extras.endpoint.openai import (
    LENGTHS,
    RefusedError,
    Sampled,
    ServedRequest,
    decode_body,
    malformed,
    parse_object,
)

_MAX_CALLS = 256  # of an episode
_MAX_TOKENS = 2**19  # of an episode's records, which take some 40 bytes each
_LONGEST_REASON = 2000  # characters
_FORM = re.compile(r"\d{1,15}(-\d{1,15}){3}-[0-9a-f]{8}\.\d{1,4}", re.ASCII)  # the id of a lease, a point, a number
_MARGIN = 0.05  # of a lease's time, for scoring and delivery
_AS_IN_TRAINING = ("temperature", "top_p", "top_k", "min_p")
_PENALTIES = ("presence_penalty", "frequency_penalty")


@dataclass(eq=False, kw_only=True)
class AgentEpisode(Episode):
    """A completion of a task while it grows. Its last record grew last. `rewards` are in the order of their names, `posted` those
    that an agent posted. `turns` has for each answered call the record that it extended, and its end there."""

    id: str
    floor: int
    num_calls: int = 0
    rewards: list[float] | None = None
    posted: Mapping[str, Any] = field(default_factory=dict)
    turns: list[tuple[Record, int]] = field(default_factory=list)
    spans: list[tuple[float, Spans]] = field(default_factory=list)  # with weights; of the last record

    def note(self, sampled: Sampled) -> None:
        """Add an answered call: it extends the record with which its prompt begins, or begins another record."""
        if self.rewards is not None:
            return
        seen = sampled.prompt_ids
        record = next((r for r in reversed(self.records) if seen[: len(r.token_ids)] == r.token_ids), None)
        if record is None:
            record = Record.of(seen)
            self.prompt_length = self.prompt_length or len(seen)
        else:
            self.records.remove(record)
            record.show(seen[len(record.token_ids) :])
        self.truncated = sampled.finish_reason == "length"
        record.sampled(Completion(sampled.token_ids, sampled.logprobs, self.truncated, sampled.token_versions))
        self.records.append(record)
        self.turns.append((record, len(record.token_ids)))

    def of_turns(self, posted: dict[str, Any]) -> list[tuple[Record, int, float]]:
        """Return record, end and reward of each turn that has one. Raise ValueError if `posted` does not fit the turns."""
        rewards = posted["turns"]
        if len(posted) > 1 or not isinstance(rewards, list) or len(rewards) != len(self.turns):
            raise ValueError(
                f"is {posted!r:.80}; post a number or null for each of {len(self.turns)} answered calls, in order"
            )
        return [
            (record, end, finite(reward, f"has turn {place}, whose reward"))
            for place, (reward, (record, end)) in enumerate(zip(rewards, self.turns, strict=True))
            if reward is not None
        ]


@dataclass(eq=False)
class Task:
    """A lease and its episodes. `done` has a result when all episodes are over, or the exception by which the lease fails."""

    lease: Lease
    episodes: list[AgentEpisode]
    ends_at: float
    done: "asyncio.Future[None]"
    environment: str
    weights: Mapping[str, float]  # of the rewards that are posted, by name
    taken_at: float | None = None

    @property
    def missing(self) -> list[float]:
        return [math.nan] * len(self.weights)

    def fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(LeaseFailure("environment_failed", reason))
            self.done.exception()  # read it: asyncio warns otherwise when the lease was cancelled


class Agents:
    """The tasks of outside agents. Agents post `reward_names` for each episode, or those that `environments` has for its
    environment; spans count with their weights. Until `read_with` is called, spans in characters are refused."""

    def __init__(
        self,
        reward_names: tuple[str, ...] = (),
        weights: Mapping[str, float] | None = None,
        environments: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        alone = {"": {name: (weights or {}).get(name, 1.0) for name in reward_names}}
        self._posted = environments or alone
        self._decode: Callable[[list[int]], str] | None = None
        self._waiting: dict[str, deque[Task]] = {name: deque() for name in self._posted}
        self._offered = asyncio.Event()
        self._episodes: dict[str, tuple[Task, AgentEpisode]] = {}
        self.rewarded = self.unrewarded = self.failed = 0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def read_with(self, tokenizer: Any) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)  # as completions are decoded

    # The lease's side

    async def fulfil(
        self, lease: Lease, waited_s: float = 0.0, environment: str = ""
    ) -> tuple[list[Episode], NDArray[np.float32], float]:
        """Return the episodes of this lease once agents have generated and scored them, the posted rewards (float32, (episodes,
        names), NaN for missing), and the seconds since an agent took the task. Raises LeaseFailure if no agent took the task
        (`returned`), the row cannot be sent, or an episode has no completion. `waited_s` of the lease's time are over."""
        _check_sendable(lease)
        names = [f"{lease.lease_id}.{number}" for number in range(lease.sampling.num_generations)]
        episodes = [AgentEpisode(0, [], id=name, floor=lease.policy_floor) for name in names]
        limit_s = max(0.0, lease.timeout_s * (1 - _MARGIN) - waited_s)
        done = asyncio.get_running_loop().create_future()
        task = Task(lease, episodes, time.monotonic() + limit_s, done, environment, self._posted[environment])
        self._episodes |= {episode.id: (task, episode) for episode in episodes}
        waiting = self._waiting[environment]
        waiting.append(task)
        self._offered.set()
        try:
            async with asyncio.timeout(limit_s):
                await task.done
        except TimeoutError:
            self._check_left(task, limit_s)
        finally:
            if task in waiting:
                waiting.remove(task)
            for name in names:
                del self._episodes[name]
        for episode in episodes:  # later samples are no part of the group
            episode.rewards = episode.rewards or task.missing
        rewards = np.array([episode.rewards for episode in episodes], np.float32)
        if any(episode.spans for episode in episodes):
            await asyncio.to_thread(self._place_spans, episodes)
        return list(episodes), rewards, time.monotonic() - (task.taken_at or 0.0)

    def _check_left(self, task: Task, limit_s: float) -> None:
        if not any(episode.num_calls for episode in task.episodes):
            raise LeaseFailure("returned", "no agent worked on it")
        empty = sum(not episode.records for episode in task.episodes)
        left = sum(episode.rewards is None for episode in task.episodes)
        self.unrewarded += left
        if empty or left == len(task.episodes):
            raise LeaseFailure(
                "generation_failed",
                f"an agent took it, but within {limit_s:.0f} s it left {empty} of {len(task.episodes)} episodes without a "
                f"completion and {left} without rewards; raise pipeline.lease_timeout_s if that is too short",
            )

    # The agent's side

    async def take(self, wait_s: float, environment: str | None = None) -> dict[str, Any] | None:
        """Give a task of an environment to an agent, in the fields of docs/serving.md; None if there is none within `wait_s`.
        Raises RefusedError if agents play no such environment, or several and none is named."""
        if environment is None and len(self._waiting) == 1:
            (environment,) = self._waiting
        if environment is None or environment not in self._waiting:
            known = ", ".join(filter(None, self._waiting)) or "a run without `environments`, where none is named"
            raise malformed(f"`environment` is {environment!r}, and agents play {known}", "environment")
        waiting = self._waiting[environment]
        try:
            async with asyncio.timeout(wait_s):
                while not waiting:
                    self._offered.clear()
                    await self._offered.wait()
        except TimeoutError:
            return None
        task = waiting.popleft()
        lease, task.taken_at = task.lease, time.monotonic()
        return {
            "id": lease.lease_id,
            "prompt": lease.prompt,
            "columns": lease.columns,
            "episodes": [episode.id for episode in task.episodes],
            "rewards": list(task.weights),
            "max_tokens": lease.sampling.max_completion_length,
            "expires_in_s": round(max(0.0, task.ends_at - time.monotonic()), 1),
        }

    def is_episode(self, name: str) -> bool:
        """Return whether a name is an episode's, also of a task that is over, and no label of a client's own."""
        return name in self._episodes or _FORM.fullmatch(name) is not None

    def find(self, episode_id: str) -> tuple[Task, AgentEpisode]:
        """Return the task and the episode of this name. Raises RefusedError if no agent has it, or its task is over."""
        found = self._episodes.get(episode_id)
        if found is None or found[0].taken_at is None:
            why = "no such episode: its task is over, or this producer is another one; take another"
            raise RefusedError(404, "unknown_episode", why, "episode")
        return found

    def prepare(self, episode_id: str, request: ServedRequest) -> tuple[AgentEpisode, ServedRequest]:
        """Return this episode and the request with the sampling of its lease. Raises RefusedError if there is no such episode, or
        the call cannot be trained."""
        task, episode = self._unrewarded(episode_id)
        if episode.num_calls >= _MAX_CALLS:
            raise malformed(f"an episode may have {_MAX_CALLS} calls", "episode")
        if episode.num_tokens >= _MAX_TOKENS:
            why = "a call that does not begin with the call before counts anew as a whole"
            raise malformed(f"an episode may have {_MAX_TOKENS} tokens in all; {why}", "episode")
        prepared = as_in_training(request, task.lease.sampling)
        episode.num_calls += 1
        return episode, prepared

    def reward(self, episode_id: str, rewards: Mapping[str, Any]) -> dict[str, Any]:
        """End an episode. The same rewards a second time change nothing. Raises RefusedError if there is no such episode, it has
        no samples, or these are not its rewards."""
        task, episode = self.find(episode_id)
        names = task.weights
        if rewards.keys() != names.keys() or not all(map(_is_reward, rewards.values())):
            expected = "a finite number, null, or an object with rewards of parts"
            raise malformed(f"expected {expected} for each of {', '.join(names)}")
        if episode.rewards is not None:
            if rewards != episode.posted:
                raise malformed("this episode has other rewards already", "episode", 409)
        elif not episode.records:
            raise malformed("nothing was sampled for this episode", "episode", 409)
        else:
            read = {name: self._read(name, rewards[name], episode) for name in names}
            episode.rewards, episode.posted = [each.worth for each in read.values()], rewards
            for name, each in read.items():
                if weight := names[name]:
                    episode.spans += [(weight, each.spans)] if each.spans else []
                    for record, end, reward in each.turns:
                        record.reward(end, weight * reward)
            self.rewarded += 1
        return self._ended(task, episode_id)

    def _read(self, name: str, posted: Any, episode: AgentEpisode) -> "_Reward":
        """Raise RefusedError if the reward does not fit the episode."""
        if not isinstance(posted, dict):
            return _Reward(math.nan if posted is None else float(posted))
        spans, turns = None, list[tuple[Record, int, float]]()
        try:
            if "turns" in posted:
                turns = episode.of_turns(posted)
                rewards = [reward for *_, reward in turns]
            else:
                ids = episode.token_ids
                text = self._decode(ids) if self._decode and "characters" in posted else None
                spans = Spans.of(posted, text, len(ids))
                rewards = spans.rewards
            worth = finite(sum(rewards), "has a sum of rewards, which") if rewards else math.nan
        except ValueError as error:
            raise malformed(f"{name} {error}", name) from None
        return _Reward(worth, spans, turns)

    def _place_spans(self, episodes: list[AgentEpisode]) -> None:
        for episode in episodes:
            ids = episode.token_ids
            for weight, spans in episode.spans:
                if spans.unit == "characters":
                    assert self._decode is not None, "they are refused until then"
                    spans = spans.in_tokens(self._decode(ids), ids, self._decode)
                episode.reward_spans(zip(spans.ends, (weight * reward for reward in spans.rewards), strict=True))

    def fail(self, episode_id: str, reason: str) -> dict[str, Any]:
        """End an episode that its agent could not finish. Its rewards are missing; without samples its whole task fails. Raises
        RefusedError if there is no such episode, or it has its rewards."""
        task, episode = self.find(episode_id)
        if not episode.failure:
            self._unrewarded(episode_id)
            self.failed += 1
            episode.failure, episode.rewards = reason, task.missing
            if not episode.records:
                task.fail(f"an episode failed before anything was sampled for it: {reason}")
        return self._ended(task, episode_id)

    def fail_taken(self, reason: str, environment: str = "") -> None:
        """Fail every task of the environment that was taken, because its agent has ended."""
        for task in dict.fromkeys(task for task, _ in self._episodes.values()):
            if task.taken_at is None or task.environment != environment:
                continue
            self.failed += sum(episode.rewards is None for episode in task.episodes)
            task.fail(reason)

    def _ended(self, task: Task, episode_id: str) -> dict[str, Any]:
        left = sum(other.rewards is None for other in task.episodes)
        if left == 0 and not task.done.done():
            task.done.set_result(None)
        return {"id": episode_id, "task": task.lease.lease_id, "episodes_left": left}

    def _unrewarded(self, episode_id: str) -> tuple[Task, AgentEpisode]:
        found = self.find(episode_id)
        if found[1].rewards is not None:
            raise malformed("this episode has its rewards already", "episode", 409)
        return found


class _Reward(NamedTuple):
    """A posted reward: its worth, NaN for missing, and that of spans or turns."""

    worth: float
    spans: Spans | None = None
    turns: Sequence[tuple[Record, int, float]] = ()


def _is_reward(value: Any) -> bool:
    return value is None or isinstance(value, dict) or (type(value) in (int, float) and abs(value) < 1e30)


def _check_sendable(lease: Lease) -> None:
    """Raise LeaseFailure if an agent cannot be sent a part of the row."""
    for place, value in [
        ("prompt", lease.prompt),
        *((f"column {name!r}", value) for name, value in lease.columns.items()),
    ]:
        try:
            msgspec.json.encode(value)
        except UNSENDABLE as error:
            raise LeaseFailure(
                "bad_prompt", f"the row's {place} cannot be sent to an agent as JSON: {error}; drop or convert it"
            ) from None


def as_in_training(request: ServedRequest, sampling: Sampling) -> ServedRequest:
    """Return the request with the sampling of the lease. Raises RefusedError if the request asks for another one."""
    if request.model != "policy" or request.num_completions != 1:
        raise malformed("a call of an episode asks for one completion of `policy`", "model")
    if (name := first_difference(request, sampling)) is not None:
        fix = f"episodes are sampled with {name}={_wanted(sampling)[name]:g}, as the run is; leave it out"
        raise malformed(fix, name)
    return sampled_as(request, sampling)


def first_difference(request: ServedRequest, sampling: Sampling) -> str | None:
    """Return the name of a field in which the request's distribution differs from the run's, or None."""
    wanted = _wanted(sampling)
    return next((name for name, value in wanted.items() if request.fields.get(name, value) != value), None)


def sampled_as(request: ServedRequest, sampling: Sampling) -> ServedRequest:
    """Return the request with the run's distribution, and no more tokens than a completion of the run may have."""
    limit = LENGTHS[request.kind]
    longest = sampling.max_completion_length
    asked = request.fields.get(limit, longest)
    return request.with_fields(_wanted(sampling) | {limit: min(asked, longest) if isinstance(asked, int) else asked})


def _wanted(sampling: Sampling) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in _AS_IN_TRAINING} | dict.fromkeys(_PENALTIES, 0)


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    environment: str | None = None


class _Failure(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(min_length=1)]


def agent_routes(agents: Agents) -> list[Route]:
    def answered(body: dict[str, Any]) -> Response:
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def take(request: Request) -> Response:
        wish = decode_body(await request.body(), _Wish, "`wait_s` from 0 to 60, `environment` and nothing else")
        task = await agents.take(wish.wait_s, wish.environment)
        return Response(status_code=204) if task is None else answered(task)

    async def reward(request: Request) -> Response:
        return answered(agents.reward(request.path_params["episode"], parse_object(await request.body())))

    async def fail(request: Request) -> Response:
        failure = decode_body(await request.body(), _Failure, "`reason`, a text, and nothing else")
        return answered(agents.fail(request.path_params["episode"], failure.reason[:_LONGEST_REASON]))

    return [
        Route("/v1/rollouts", take, methods=["POST"]),
        Route("/v1/rollouts/{episode}/reward", reward, methods=["POST"]),
        Route("/v1/rollouts/{episode}/failure", fail, methods=["POST"]),
    ]
