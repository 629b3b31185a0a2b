"""The pool of rewards: what scores a group, whatever it is made of.

Guarantee: `score` returns rewards or raises `LeaseFailure`, whatever the functions do. A reward that failed, after its
retries, is missing and never a zero: its function is left out for the whole group, or, where it failed for some completions
only, these completions are left out, since a sum without it would not compare with the others'. Every failure is counted and
logged under the name of its function, with the prompt.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from producer.interfaces import Failure, LeaseFailure
from producer.rewards.processes import WorkerLane, WorkerLostError
from producer.rewards.service import HttpReward
from producer.rewards.thinking import Thinking
from producer.rewards.views import View
from producer.rewards.worker import Job, Scores, Source
from protocol.config.rewards import RewardFunction, RewardModel, RewardService, RewardsSection
from protocol.throttle import Throttle

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0  # imports of the user's modules included
_MODEL_START_TIMEOUT_S = 900.0  # a download included
_SERVICE_CONCURRENCY = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_PROMPT_SHOWN = 80


class RewardObserver(Protocol):
    """Told of every call of a function and of what it failed to score."""

    def reward_called(self, function: str, seconds: float) -> None: ...

    def reward_failed(self, function: str, reason: Failure, num_completions: int) -> None: ...


class RewardSource(Protocol):
    """Something that scores a job with one function."""

    async def ask(self, job: Job, limit_s: float) -> Scores: ...


class _Unobserved:
    def reward_called(self, function: str, seconds: float) -> None:
        pass

    def reward_failed(self, function: str, reason: Failure, num_completions: int) -> None:
        pass


class _FromWorker:
    """One function of a lane."""

    def __init__(self, lane: WorkerLane, place: int) -> None:
        self._lane = lane
        self._place = place

    @property
    def is_asynchronous(self) -> bool:
        return self._place in self._lane.asynchronous

    async def ask(self, job: Job, limit_s: float) -> Scores:
        started = time.monotonic()
        try:
            (scores,) = await self._lane.call([self._place], [job], [limit_s])
        except WorkerLostError as error:
            return Scores(None, str(error), error.reason, seconds=time.monotonic() - started)
        return scores


class RewardPool:
    """Every reward of the configuration, ready to score between `start` and `close`."""

    def __init__(self, section: RewardsSection, observer: RewardObserver | None = None) -> None:
        self._section = section
        self._observer = observer or _Unobserved()
        self._warn = Throttle(logger)
        self._thinking: Thinking | None = None
        self._in_lane = [i for i, f in enumerate(section.functions) if f.kind in ("function", "builtin")]
        ours = [section.functions[index] for index in self._in_lane]
        self._lane = WorkerLane(
            {function.name: _source(function) for function in ours},
            section.num_workers if ours else 0,
            section.max_memory_bytes,
            _START_TIMEOUT_S,
        )
        self._lanes, self._services = [self._lane], list[HttpReward]()
        self._sources = [self._source(index, function) for index, function in enumerate(section.functions)]
        self._places = {
            function.name: asyncio.Semaphore(function.concurrency)
            for function in ours
            if function.concurrency is not None
        }

    def _source(self, index: int, function: RewardFunction) -> RewardSource:
        settings = function.settings if function.kind != "function" else None
        if isinstance(settings, RewardService):
            service = HttpReward(
                function.name, str(function.url), settings, function.concurrency or _SERVICE_CONCURRENCY
            )
            self._services.append(service)
            return service
        if isinstance(settings, RewardModel):
            shown = "" if settings.gpu is None else str(settings.gpu)
            lane = WorkerLane(
                {function.name: Source(shipped="model", options=function.options | {"path": function.model})},
                function.concurrency or 1,
                None,  # a model takes what it takes
                _MODEL_START_TIMEOUT_S,
                {"CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            )
            self._lanes.append(lane)
            return _FromWorker(lane, 0)
        return _FromWorker(self._lane, self._in_lane.index(index))

    @property
    def num_workers(self) -> int:
        return sum(lane.num_workers for lane in self._lanes)

    @property
    def num_idle(self) -> int:
        return sum(lane.num_idle for lane in self._lanes)

    async def start(self) -> None:
        """Starts what scores.

        Raises:
            ConfigError: a function cannot be imported.
        """
        await asyncio.gather(*(lane.start() for lane in self._lanes))

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self._lanes), *(service.close() for service in self._services))

    def read_thinking(self, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
        """Comes before the first `score`."""
        if self._section.reads_thinking:
            self._thinking = Thinking(self._section.thinking, tokenizer, chat_template_kwargs)

    async def score(
        self, prompt: Any, completions: list[Any], completion_ids: list[list[int]], columns: dict[str, Any]
    ) -> tuple[NDArray[np.float32], float]:
        """Rewards as (completions, functions), NaN for missing, and the seconds it took.

        Args:
            completions: texts, or lists of messages where the prompt is one.

        Raises:
            LeaseFailure: nothing was scored because functions failed; the detail names them.
        """
        started = time.monotonic()
        job = Job(prompt, completions, completion_ids, columns)
        reasoning = None
        assert self._thinking is not None or not self._section.reads_thinking, "read_thinking comes first"
        if self._thinking is not None:
            counts = self._section.counts_reasoning
            reasoning = await asyncio.to_thread(self._thinking.read, prompt, completions, completion_ids, count=counts)
        views = [View.of(self._section, function, job, reasoning) for function in self._section.functions]
        answers = await self._ask_all([view.job for view in views])
        count = len(completions)
        scores = [view.widened(answer, count) for view, answer in zip(views, answers, strict=True)]
        left_out = {row for view in views for row in view.left_out(count)}
        return self._collected(scores, left_out, prompt, count), time.monotonic() - started

    async def _ask_all(self, jobs: list[Job]) -> list[Scores]:
        """Of every function, in order. The asynchronous ones of the workers are awaited together, as TRL does."""
        together = [
            index
            for index, source in enumerate(self._sources)
            if isinstance(source, _FromWorker)
            and source.is_asynchronous
            and not self._section.functions[index].concurrency
            and jobs[index].completions
        ]
        alone = [index for index in range(len(jobs)) if index not in together]
        answers, others = await asyncio.gather(
            self._ask_together(together, jobs), asyncio.gather(*(self._ask(index, jobs[index]) for index in alone))
        )
        found = dict(zip([*together, *alone], [*answers, *others], strict=True))
        return [found[index] for index in range(len(jobs))]

    async def _ask_together(self, indexes: list[int], jobs: list[Job]) -> list[Scores]:
        firsts: Sequence[Scores | None] = [None] * len(indexes)
        if len(indexes) > 1:
            places = [self._in_lane.index(index) for index in indexes]
            limits_s = [self._section.limit_s(self._section.functions[index]) for index in indexes]
            # If the worker is lost, nobody knows through whom: then each is asked alone.
            with contextlib.suppress(WorkerLostError):
                firsts = await self._lane.call(places, [jobs[index] for index in indexes], limits_s)
        return await asyncio.gather(
            *(self._ask(index, jobs[index], first) for index, first in zip(indexes, firsts, strict=True))
        )

    async def _ask(self, index: int, job: Job, first: Scores | None = None) -> Scores:
        """With retries. `first`: what the first try said, if there was one."""
        function, source = self._section.functions[index], self._sources[index]
        if not job.completions:
            return Scores([])
        for attempt in range(function.attempts):
            if attempt > 0:
                await asyncio.sleep(_pause_s(attempt))
            if first is not None and attempt == 0:
                scores = first
            else:
                async with self._places.get(function.name, contextlib.nullcontext()):
                    scores = await source.ask(job, self._section.limit_s(function))
            self._observer.reward_called(function.name, scores.seconds)
            if scores.rewards is not None or scores.is_final:
                break
        return scores

    def _collected(
        self, scores: list[Scores], left_out: set[int], prompt: Any, num_completions: int
    ) -> NDArray[np.float32]:
        rewards = np.full((num_completions, len(scores)), np.nan, np.float32)
        problems = []
        for column, (function, one) in enumerate(zip(self._section.functions, scores, strict=True)):
            if one.rewards is None:
                problems.append(self._failed(function, one.reason, one.problem, prompt, num_completions))
                continue
            rewards[:, column] = one.rewards
            for row, (reason, problem) in one.failed.items():
                left_out.add(row)
                problems.append(self._failed(function, reason, problem, prompt, 1))
        rewards[list(left_out)] = np.nan
        if problems and np.isnan(rewards).all():
            raise LeaseFailure("reward_failed", "\n".join(problems))
        return rewards

    def _failed(
        self, function: RewardFunction, reason: Failure, problem: str, prompt: Any, num_completions: int
    ) -> str:
        self._observer.reward_failed(function.name, reason, num_completions)
        said = f"{function.place} {problem}"
        shown = f"{num_completions} completion{'s' if num_completions > 1 else ''} of prompt {str(prompt)[:_PROMPT_SHOWN]!r}"
        self._warn(f"{function.name} {reason}", f"reward {function.name} is missing for {shown} ({reason}): {said}")
        return said


def _source(function: RewardFunction) -> Source:
    if function.function is not None:
        return Source(function=function.function)
    return Source(shipped=str(function.builtin), options=function.options)


def _pause_s(attempt: int) -> float:
    """Before further try `attempt` (1 is the first), doubled each time, half of it by chance."""
    longest: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
