"""The pool of rewards: it scores groups, whatever the rewards come from.

Guarantee: `score` returns rewards or raises `LeaseFailure`, whatever the functions do. A reward that failed, after its
retries, is missing and never a zero: its function is excluded for the whole group. If it failed for some completions only,
these completions are excluded, because a sum without it would not compare with the others'. Every failure is counted and logged
under the name of its function, with the prompt. Equal failures travel to the trainer as one entry, at most `MAX_FAILURES`.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.groups import LeaseFailure
from producer.rewards.contract import TrainerState
from producer.rewards.http_reward import HttpReward
from producer.rewards.messages import Failure, Job, Scores
from producer.rewards.services import WorkerReward, sources_of
from producer.rewards.spans import Spans
from producer.rewards.steps import reduced
from producer.rewards.thinking import Thinking, view, with_hidden_rows
from producer.rewards.workers import WorkerLostError
from protocol.config.environments import environment_of
from protocol.config.functions import REWARD_ARGUMENTS
from protocol.config.reward_options import Steps
from protocol.config.rewards import RewardFunction, RewardsSection
from protocol.errors import ConfigError
from protocol.runtime.logs import Throttle
from protocol.wire.messages import MOST_COLUMNS, MOST_METRICS, Logged, MissingReward, RunPlan

logger = logging.getLogger(__name__)

_SERVICE_CONCURRENCY = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_MAX_PROMPT_CHARS = 80
_UNCLOSED = "the reasoning does not end (rewards.thinking.unclosed)"
MAX_FAILURES, _MAX_PROBLEM_CHARS = 16, 500


class RewardFailures:
    """Collects why rewards of one group are missing."""

    def __init__(self) -> None:
        self._completions: dict[tuple[str, str, str], list[int]] = {}

    def add(self, function: str, reason: str, problem: str, completions: Iterable[int] = ()) -> None:
        """Add a failure of these completions, by number; of all if there are none."""
        self._completions.setdefault((function, reason, problem[-_MAX_PROBLEM_CHARS:]), []).extend(completions)

    def entries(self) -> tuple[MissingReward, ...]:
        found = list(self._completions.items())[:MAX_FAILURES]
        return tuple(MissingReward(*failure, tuple(completions)) for failure, completions in found)


class Scored(NamedTuple):
    rewards: NDArray[np.float32]  # (completions, functions), NaN for missing
    seconds: float  # that it took
    failures: RewardFailures
    spans: Sequence[list[tuple[int, float]]] = ()  # of each completion: ends in tokens, and rewards times their weights
    logged: Logged = Logged()


class RewardTerms(NamedTuple):
    """A reward function, and how the pool asks it."""

    name: str
    place: str
    weight: float
    attempts: int
    limit_s: float
    steps: Steps | None
    environments: frozenset[str] | None  # whose rows it scores; None: all
    counts_reasoning: bool
    strips_reasoning: bool

    @classmethod
    def of(cls, section: RewardsSection, function: RewardFunction) -> "RewardTerms":
        environments = None if function.environments is None else frozenset(function.environments)
        return cls(
            function.name, function.place, function.weight, function.attempts, section.limit_s(function), function.steps,
            environments, function.counts_reasoning, section.strips(function),
        )  # fmt: skip

    def scores(self, environment: str) -> bool:
        return self.environments is None or environment in self.environments


class RewardObserver(Protocol):
    """Counts every call of a function, and every completion that it failed to score."""

    def reward_called(self, function: str, seconds: float) -> None: ...

    def reward_failed(self, function: str, reason: Failure, num_completions: int) -> None: ...


class RewardPool:
    """Scores groups with every reward of the configuration, between `start` and `close`."""

    def __init__(self, section: RewardsSection, observer: RewardObserver) -> None:
        self._section = section
        self._observer = observer
        self._warn = Throttle(logger)
        self._thinking: Thinking | None = None
        self._tokenizer: Any = None
        self._plan = RunPlan()
        self._sources = sources_of(section)
        self._functions = [RewardTerms.of(section, function) for function in section.functions]
        self._reads_thinking, self._counts_reasoning = section.reads_thinking, section.counts_reasoning
        self._unclosed = section.thinking.unclosed
        self._pools = {source.workers for source in self._sources if isinstance(source, WorkerReward)}
        self._limiters = {
            function.name: asyncio.Semaphore(function.concurrency or _SERVICE_CONCURRENCY)
            for function in section.functions
            if function.kind == "url" or (function.kind != "model" and function.concurrency is not None)
        }
        self.num_workers = sum(pool.num_workers for pool in self._pools)

    @property
    def num_idle(self) -> int:
        return sum(pool.num_idle for pool in self._pools)

    async def start(self) -> None:
        """Start all workers. Raise ConfigError if a function cannot be imported."""
        await asyncio.gather(*(pool.start() for pool in self._pools))

    async def close(self) -> None:
        services = [source.close() for source in self._sources if isinstance(source, HttpReward)]
        await asyncio.gather(*(pool.close() for pool in self._pools), *services)

    def read_with(self, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
        """Prepare to read reasoning, and spans in characters; call it before the first `score`."""
        self._tokenizer = tokenizer
        if self._reads_thinking:
            self._thinking = Thinking(self._section.thinking, tokenizer, chat_template_kwargs)

    def begin(self, plan: RunPlan) -> None:
        """Score groups of this run from now on. Raise ConfigError if a function needs a column that no row has."""
        self._plan = plan
        if plan.columns is None:
            return
        there = f"The dataset has beside the prompt: {', '.join(plan.columns) or 'no column'}"
        for function, source in zip(self._section.functions, self._sources, strict=True):
            where = f"rewards.functions: {function.name} ({function.place})"
            column = getattr(function.settings, "column", None)
            if column is not None and column not in plan.columns:
                raise ConfigError(
                    f"{where} needs the column `{column}`. {there}. Set options.column, or add the column"
                )
            needed = source.columns if isinstance(source, WorkerReward) else []
            if lacking := [name for name in needed if name not in plan.columns]:
                raise ConfigError(
                    f"{where} needs `{'`, `'.join(lacking)}`, which nothing passes. {there}. Every function may take "
                    f"{', '.join(REWARD_ARGUMENTS)}. Rename the argument, give it a default, or add the column"
                )

    async def score(
        self,
        prompt: Any,
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, Any],
        *,
        number: int = 0,
        version: int = 0,
    ) -> "Scored":
        """Score a group of this prompt number and policy version with the functions for its environment. Its completions are
        texts, or lists of messages if the prompt is one. Raise LeaseFailure, with the functions that failed, if nothing was
        scored."""
        started, environment = time.monotonic(), environment_of(columns)
        job = Job(prompt, completions, completion_ids, columns, state=TrainerState.of(self._plan, version))
        reasoning = None
        if self._reads_thinking:
            assert self._thinking is not None, "call read_with first"
            read = partial(self._thinking.read, count=self._counts_reasoning)
            reasoning = await asyncio.to_thread(read, prompt, completions, completion_ids)
        nothing = (Job(prompt, [], [], {}), dict[int, float]())
        views = [
            view(job, reasoning, self._unclosed, counts=function.counts_reasoning, strips=function.strips_reasoning)
            if function.scores(environment)
            else nothing
            for function in self._functions
        ]
        answers = await self._ask_all([seen for seen, _ in views])
        rewards = np.full((len(completions), len(self._functions)), np.nan, np.float32)
        excluded, problems, failed = set[int](), list[str](), RewardFailures()
        spans: list[list[tuple[int, float]]] = [[] for _ in completions]
        logged = list[Logged]()
        for column, (function, (seen, hidden), answer) in enumerate(zip(self._functions, views, answers, strict=True)):
            if not function.scores(environment):
                continue
            answer = await asyncio.to_thread(self._in_tokens, answer, seen) if answer.spans else answer
            scores = with_hidden_rows(answer, hidden)
            logged.append(scores.logged)
            unseen = {row for row, reward in hidden.items() if math.isnan(reward)}
            if unseen:
                failed.add(function.name, "unclosed", _UNCLOSED, unseen)
            excluded |= scores.failed.keys() | unseen
            failures = [(1, *why) for why in scores.failed.values()]
            if scores.rewards is None:
                failures = [(len(completions), scores.reason, scores.problem)]
                failed.add(function.name, scores.reason, scores.problem)
            else:
                rewards[:, column] = scores.rewards
                for row, why in scores.failed.items():
                    failed.add(function.name, *why, [row])
                for row, found in scores.spans.items() if function.weight else ():
                    spans[row] += zip(found.ends, (function.weight * reward for reward in found.rewards), strict=True)
            subject = f"{number} ({str(prompt)[:_MAX_PROMPT_CHARS]!r})"
            problems += [self._failed(function, subject, *failure) for failure in failures]
        rewards[list(excluded)] = np.nan
        spans = [[] if row in excluded else each for row, each in enumerate(spans)]
        if problems and np.isnan(rewards).all():
            raise LeaseFailure("reward_failed", "\n".join(problems))
        return Scored(rewards, time.monotonic() - started, failed, spans, merged(logged))

    def _in_tokens(self, scores: Scores, job: Job) -> Scores:
        """Return the scores with the ends of all spans in tokens; where that cannot be, the completion failed."""
        rewards, failed, spans = list(scores.rewards or ()), dict(scores.failed), dict[int, Spans]()
        for row, found in scores.spans.items():
            try:
                spans[row] = found.in_tokens(job.completions[row], job.completion_ids[row], self._decode)
            except ValueError as error:
                rewards[row], failed[row] = math.nan, ("invalid", f"reward {row} {error}")
        return msgspec.structs.replace(scores, rewards=rewards, failed=failed, spans=spans)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)  # as completions are decoded
        return text

    async def _ask_all(self, jobs: list[Job]) -> list[Scores]:
        """Ask every function, in order. The workers' asynchronous functions are awaited together, as in TRL."""
        together = {
            index: source
            for index, source in enumerate(self._sources)
            if isinstance(source, WorkerReward)
            and source.is_asynchronous
            and self._functions[index].name not in self._limiters
            and jobs[index].completions
        }
        first = asyncio.ensure_future(self._ask_together(together, jobs))
        asked = (self._ask(index, job, first if index in together else None) for index, job in enumerate(jobs))
        _, scores = await asyncio.gather(first, asyncio.gather(*asked))
        return scores

    async def _ask_together(self, sources: dict[int, WorkerReward], jobs: list[Job]) -> dict[int, Scores]:
        """Ask these functions in one call. If the call loses its worker, return no answers: the faulty function is unknown, so
        each is asked alone."""
        if len(sources) < 2:
            return {}
        limits_s = [self._functions[index].limit_s for index in sources]
        numbers, called = [source.number for source in sources.values()], [jobs[index] for index in sources]
        try:
            found = await next(iter(sources.values())).workers.call(numbers, called, limits_s)
        except WorkerLostError:
            return {}
        return dict(zip(sources, found, strict=True))

    async def _ask(self, index: int, job: Job, first: "asyncio.Future[dict[int, Scores]] | None") -> Scores:
        """Ask one function, with retries. `first` has the result of the first attempt, if there was one."""
        function, source = self._functions[index], self._sources[index]
        if not job.completions:
            return Scores([])
        started, scores = time.monotonic(), (await first).get(index) if first else None
        for attempt in range(function.attempts):
            if attempt > 0:
                await asyncio.sleep(pause_s(attempt))
            if attempt > 0 or scores is None:
                async with self._limiters.get(function.name, contextlib.nullcontext()):
                    started = time.monotonic()
                    scores = await source.ask(job, function.limit_s)
            self._observer.reward_called(function.name, scores.seconds or time.monotonic() - started)
            if scores.rewards is not None or scores.is_final:
                break
        assert scores is not None
        return scores if function.steps is None else reduced(scores, function.steps)

    def _failed(self, function: RewardTerms, prompt: str, count: int, reason: Failure, problem: str) -> str:
        self._observer.reward_failed(function.name, reason, count)
        detail = f"{function.place} {problem}"
        subject = f"{count} completion{'s' if count > 1 else ''} of prompt {prompt}"
        self._warn(f"{function.name} {reason}", f"reward {function.name} is missing for {subject} ({reason}): {detail}")
        return detail


def merged(logged: Sequence[Logged]) -> Logged:
    """Return what all functions logged: of a number the mean, of a column the last."""
    numbers: dict[str, list[float]] = {}
    extra: dict[str, tuple[str, ...]] = {}
    for one in logged:
        extra |= one.extra
        for name, value in one.metrics.items():
            numbers.setdefault(name, []).append(value)
    metrics = {name: math.fsum(values) / len(values) for name, values in list(numbers.items())[:MOST_METRICS]}
    return Logged(metrics, dict(list(extra.items())[:MOST_COLUMNS]))


def pause_s(attempt: int) -> float:
    """Return the pause before a retry (1 is the first). It doubles each time, and half of it is random."""
    longest: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
