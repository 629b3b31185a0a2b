"""An HTTP service as a reward.

Guarantee: a group is one request. No redirect is followed, and at most `max_answer_bytes` are read. An answer of another form is
a failure with that reason.

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
from typing import TYPE_CHECKING

import msgspec

from producer.rewards.messages import Failure, Job, Scores
from producer.rewards.steps import Ends, as_spans, split, step_texts
from producer.rewards.worker import checked
from protocol.channel.keys import secret_line
from protocol.config.reward_options import RewardService
from protocol.errors import UNREADABLE, UNSENDABLE, ConfigError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_MAX_ERROR_CHARS = 300
_TRANSIENT_STATUS = {408, 425, 429}
_SENT = ("prompt", "completions", "columns", "completion_ids")


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
