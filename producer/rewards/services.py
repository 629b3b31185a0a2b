"""The sources of rewards: functions in worker processes, models in processes of their own, HTTP services.

Guarantee: a source returns scores or a reason within its limit.
"""

from dataclasses import dataclass

from producer.rewards.http_reward import HttpReward
from producer.rewards.messages import Job, Scores, Source
from producer.rewards.nemo_gym import NemoGymReward
from producer.rewards.workers import WorkerLostError, WorkerPool
from protocol.config.reward_options import FeatureMatching, RewardModel, RewardService
from protocol.config.rewards import RewardFunction, RewardsSection
from protocol.gpu.nvml import environment_of

_START_TIMEOUT_S = 120.0  # imports of the user's modules included
_MODEL_START_TIMEOUT_S = 900.0  # a download included


@dataclass(frozen=True)
class WorkerReward:
    """A function of a pool of workers."""

    workers: WorkerPool
    number: int

    @property
    def is_asynchronous(self) -> bool:
        return self.number in self.workers.asynchronous

    @property
    def columns(self) -> list[str]:
        """The columns that it needs."""
        return self.workers.columns[self.number]

    async def ask(self, job: Job, limit_s: float) -> Scores:
        try:
            (scores,) = await self.workers.call([self.number], [job], [limit_s])
        except WorkerLostError as error:
            return Scores(None, str(error), error.reason)
        return scores


def sources_of(section: RewardsSection) -> list[WorkerReward | HttpReward]:
    """Return the sources of a section's functions, in their order. Functions share workers; each model has its own, and so have
    entries that match features by the same model. Raise ConfigError if a service has a header that cannot be sent."""
    given = {each.name: Source(each.function, each.options) for each in section.functions if each.function is not None}
    matching = {
        each.name: each.settings.model_copy(update={"score": "reward"}).model_dump_json()
        for each in section.functions
        if isinstance(each.settings, FeatureMatching)
    }
    ours = {name: source for name, source in given.items() if name not in matching}
    networks: dict[str, WorkerPool] = {}
    where = environment_of(section.gpu)
    shared = WorkerPool(ours, section.num_workers, section.max_memory_bytes, _START_TIMEOUT_S, where)
    sources: list[WorkerReward | HttpReward] = []
    for function in section.functions:
        settings = function.settings
        if isinstance(settings, RewardService):
            service = NemoGymReward if settings.nemo_gym else HttpReward
            sources.append(service(function.name, str(function.url), settings))
        elif isinstance(settings, FeatureMatching):
            options = matching[function.name]
            alike = [name for name in matching if matching[name] == options]
            if options not in networks:
                networks[options] = _model_pool({name: given[name] for name in alike}, function, settings.gpu)
            sources.append(WorkerReward(networks[options], alike.index(function.name)))
        elif isinstance(settings, RewardModel):
            model = {function.name: Source(str(function.model), function.options, is_model=True)}
            sources.append(WorkerReward(_model_pool(model, function, settings.gpu), 0))
        else:
            sources.append(WorkerReward(shared, list(ours).index(function.name)))
    return sources


def _model_pool(sources: dict[str, Source], function: RewardFunction, gpu: int | None) -> WorkerPool:
    """Return the processes of a model, without a limit of memory, because its use is known beforehand."""
    return WorkerPool(sources, function.concurrency or 1, None, _MODEL_START_TIMEOUT_S, environment_of(gpu))
