"""The sources of rewards: functions in worker processes, models in processes of their own, HTTP services.

Guarantee: a source answers with scores or a reason within the limit it is given.
"""

import asyncio
import time
from typing import Protocol

from producer.rewards.processes import WorkerLostError, WorkerPool
from producer.rewards.service import HttpReward
from producer.rewards.worker import Job, Scores, Source
from protocol.config.sections.rewards import RewardFunction, RewardModel, RewardService, RewardsSection

_START_TIMEOUT_S = 120.0  # imports of the user's modules included
_MODEL_START_TIMEOUT_S = 900.0  # a download included


class RewardSource(Protocol):
    """Something that scores a job with one function."""

    async def ask(self, job: Job, limit_s: float) -> Scores: ...


class WorkerReward:
    """One function of a pool of workers."""

    def __init__(self, workers: WorkerPool, number: int) -> None:
        self.workers = workers
        self.number = number

    @property
    def is_asynchronous(self) -> bool:
        return self.number in self.workers.asynchronous

    async def ask(self, job: Job, limit_s: float) -> Scores:
        started = time.monotonic()
        try:
            (scores,) = await self.workers.call([self.number], [job], [limit_s])
        except WorkerLostError as error:
            return Scores(None, str(error), error.reason, seconds=time.monotonic() - started)
        return scores


class RewardSources:
    """The sources of a section's functions, in their order: `in_order`. Functions share the workers `shared`."""

    def __init__(self, section: RewardsSection) -> None:
        ours = {each.name: _source(each) for each in section.functions if each.kind in ("function", "builtin")}
        self._numbers = list(ours)
        self.shared = WorkerPool(ours, section.num_workers if ours else 0, section.max_memory_bytes, _START_TIMEOUT_S)
        self._pools, self._services = [self.shared], list[HttpReward]()
        self.in_order: list[RewardSource] = [self._made(function) for function in section.functions]

    def _made(self, function: RewardFunction) -> RewardSource:
        settings = function.settings if function.kind != "function" else None
        if isinstance(settings, RewardService):
            service = HttpReward(function.name, str(function.url), settings)
            self._services.append(service)
            return service
        if isinstance(settings, RewardModel):
            workers = WorkerPool(
                {function.name: Source(shipped="model", options=function.options | {"path": function.model})},
                function.concurrency or 1,
                None,  # a model's memory is known beforehand
                _MODEL_START_TIMEOUT_S,
                {
                    "CUDA_VISIBLE_DEVICES": "" if settings.gpu is None else str(settings.gpu),
                    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                },
            )
            self._pools.append(workers)
            return WorkerReward(workers, 0)
        return WorkerReward(self.shared, self._numbers.index(function.name))

    @property
    def num_workers(self) -> int:
        return sum(pool.num_workers for pool in self._pools)

    @property
    def num_idle(self) -> int:
        return sum(pool.num_idle for pool in self._pools)

    async def start(self) -> None:
        """Starts all workers.

        Raises:
            ConfigError: a function cannot be imported.
        """
        await asyncio.gather(*(pool.start() for pool in self._pools))

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools), *(service.close() for service in self._services))


def _source(function: RewardFunction) -> Source:
    if function.function is not None:
        return Source(function=function.function)
    return Source(shipped=str(function.builtin), options=function.options)
