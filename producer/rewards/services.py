"""The sources of rewards: functions in worker processes, models in processes of their own, HTTP services.

Guarantee: a source returns scores or a reason within its limit. A service gets one request per group, one of NeMo Gym
(`producer.rewards.nemo_gym`) one per completion. No redirect is followed, and at most `max_answer_bytes` are read. An answer of
another form is a failure with that reason.

    POST URL  {"prompt": ..., "completions": [...], "completion_ids": [[...]], "columns": {"answer": ...}}
    200       {"rewards": [1.0, null, ...]}   a finite number per completion, null for missing, or spans:
              {"rewards": [{"tokens": [[3, 0.5], [9, 1.0]]}, ...]}

With `steps` the request has them too, and the answer a number for each of them. An answer without that is the request's failure.

    POST URL  {..., "steps": [["First.\n\n", "Then."], [], ...]}
    200       {"rewards": [[0.5, 1.0], [], ...]}
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from producer.rewards.steps import Ends, as_spans, split, step_texts
from producer.rewards.worker import Failure, Job, Scores, Source, checked
from producer.rewards.workers import WorkerLostError, WorkerPool
from protocol.channel.keys import secret_line
from protocol.config.reward_options import FeatureMatching, RewardModel, RewardService
from protocol.config.rewards import RewardFunction, RewardsSection
from protocol.errors import UNREADABLE, UNSENDABLE, ConfigError
from protocol.gpu.nvml import environment_of

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_START_TIMEOUT_S = 120.0  # imports of the user's modules included
_MODEL_START_TIMEOUT_S = 900.0  # a download included
_MAX_ERROR_CHARS = 300
_TRANSIENT_STATUS = {408, 425, 429}
_SENT = ("prompt", "completions", "columns", "completion_ids")


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


class _Answer(msgspec.Struct):
    rewards: list[float | dict[str, list[tuple[int, float]]] | None]


class _StepAnswer(msgspec.Struct):
    rewards: list[list[float] | None]


class HttpReward:
    """An HTTP service. Raises ConfigError if a header's variable is not set, or its value cannot be sent as a header."""

    def __init__(self, name: str, url: str, settings: RewardService) -> None:
        self._url = url
        self._max_answer_bytes = settings.max_answer_bytes
        self._steps = settings.steps
        self._splitter = ThreadPoolExecutor(1, "steps")  # slow patterns delay each other alone
        self._headers = {"Content-Type": "application/json"}
        self._session: ClientSession | None = None
        for header, variable in settings.headers_env.items():
            if variable not in os.environ:
                raise ConfigError(
                    f"rewards.functions: {name}: header {header} needs the environment variable {variable}"
                )
            where = f"rewards.functions: {name}: environment variable {variable}, header {header}"
            self._headers[header] = secret_line(os.environb[variable.encode()], where)

    async def close(self) -> None:
        self._splitter.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()

    async def ask(self, job: Job, limit_s: float) -> Scores:
        try:
            async with asyncio.timeout(limit_s):
                return await self.scores(job)
        except TimeoutError:
            return failed(f"did not answer within {limit_s:g} seconds", "timeout")

    async def scores(self, job: Job) -> Scores:
        """Return the scores of a group, however long that takes."""
        try:
            ends = await self._ends(job)
            body = await asyncio.to_thread(_body, job, ends)
        except UNSENDABLE as error:
            return failed(f"cannot be sent this group: {error}", "invalid", is_final=True)
        answer = await self.posted(body)
        return answer if isinstance(answer, Scores) else _read(answer, job, ends)

    async def posted(self, body: bytes) -> bytes | Scores:
        """Return the answer to a request, or why there is none."""
        import aiohttp  # takes a fifth of a second, which only runs with a service spend

        if self._session is None:  # aiohttp's own limit is 300 seconds, whatever that of a call is
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        try:
            asked = self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False)
            async with asked as response:
                return await self._content(response)
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            return failed(f"could not be reached: {error or type(error).__name__}", "unavailable")

    async def _ends(self, job: Job) -> list[Ends] | None:
        if self._steps is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._splitter, split, job.completions, self._steps)

    async def _content(self, response: "ClientResponse") -> bytes | Scores:
        content, status = bytearray(), response.status
        async for part in response.content.iter_any():
            content += part
            if len(content) > self._max_answer_bytes:
                return failed(f"answered more than options.max_answer_bytes={self._max_answer_bytes}", "invalid")
        if status != 200:
            text = content[:_MAX_ERROR_CHARS].decode(errors="replace")
            is_final = 300 <= status < 500 and status not in _TRANSIENT_STATUS
            return failed(f"answered with status {status}: {text}", "unavailable", is_final=is_final)
        return bytes(content)


def _read(content: bytes, job: Job, ends: list[Ends] | None) -> Scores:
    try:
        if ends is None:
            return checked(msgspec.json.decode(content, type=_Answer).rewards, job)
        answer = msgspec.json.decode(content, type=_StepAnswer)
    except UNREADABLE as error:
        return failed(f'sent another answer than {{"rewards": [...]}}: {error}', "invalid")
    try:
        return checked(as_spans(answer.rewards, ends), job)
    except ValueError as error:
        return failed(str(error), "invalid")


def _body(job: Job, ends: list[Ends] | None) -> bytes:
    ready = job.in_pieces(msgspec.json)
    body = {name: getattr(ready, name) for name in _SENT}
    if ends is not None:
        body["steps"] = list(map(step_texts, job.completions, ends))
    return msgspec.json.encode(body)


def failed(problem: str, reason: Failure, *, is_final: bool = False) -> Scores:
    return Scores(None, problem, reason, is_final=is_final)


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
            service = _nemo_gym() if settings.nemo_gym else HttpReward
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


def _nemo_gym() -> type[HttpReward]:
    from producer.rewards.nemo_gym import NemoGymReward  # which extends what is above

    return NemoGymReward


def _model_pool(sources: dict[str, Source], function: RewardFunction, gpu: int | None) -> WorkerPool:
    """Return the processes of a model, without a limit of memory, because its use is known beforehand."""
    return WorkerPool(sources, function.concurrency or 1, None, _MODEL_START_TIMEOUT_S, environment_of(gpu))
