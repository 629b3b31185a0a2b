"""A reward from an HTTP service.

Guarantee: there is one request per group, which is answered or given up within its limit. No redirect is followed, and no
more than `max_answer_bytes` are read. An answer of another form is a failure that says so.

    POST URL  {"prompt": ..., "completions": [...], "completion_ids": [[...]], "columns": {"answer": ...}}
    200       {"rewards": [1.0, null, ...]}   a finite number per completion, null for missing
"""

import asyncio
import os
import time
from typing import TYPE_CHECKING

import msgspec

from producer.interfaces import Failure
from producer.rewards.worker import Job, Scores, checked
from protocol.config.sections.rewards import RewardService
from protocol.errors import ConfigError
from protocol.security.secret_lines import secret_line

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_SHOWN = 300
_WORTH_ANOTHER_TRY = {408, 425, 429}


class _Answer(msgspec.Struct):
    rewards: list[float | None]


class HttpReward:
    """Raises ConfigError where a header's variable is not set, or holds what no header can."""

    def __init__(self, name: str, url: str, settings: RewardService) -> None:
        self._url = url
        self._max_answer_bytes = settings.max_answer_bytes
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
        if self._session is not None:
            await self._session.close()

    async def ask(self, job: Job, limit_s: float) -> Scores:
        started = time.monotonic()
        scores = await self._within(job, limit_s)
        return msgspec.structs.replace(scores, seconds=time.monotonic() - started)

    async def _within(self, job: Job, limit_s: float) -> Scores:
        import aiohttp  # it takes a fifth of a second, which only runs with a service need to spend

        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        fields = ("prompt", "completions", "completion_ids", "columns")
        body = msgspec.json.encode({name: getattr(job, name) for name in fields})
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as response,
            ):
                content = await self._content(response)
                if content is None:
                    return self._failed(
                        f"answered more than options.max_answer_bytes={self._max_answer_bytes}", "invalid"
                    )
                return self._read(response.status, content, len(job.completions))
        except TimeoutError:
            return self._failed(f"did not answer within {limit_s:g} seconds", "timeout")
        except (aiohttp.ClientError, OSError) as error:
            return self._failed(f"cannot be asked: {error or type(error).__name__}", "unavailable")

    async def _content(self, response: "ClientResponse") -> bytes | None:
        content = bytearray()
        async for part in response.content.iter_any():
            content += part
            if len(content) > self._max_answer_bytes:
                return None
        return bytes(content)

    def _read(self, status: int, content: bytes, count: int) -> Scores:
        if status != 200:
            said = content[:_SHOWN].decode(errors="replace")
            final = 300 <= status < 500 and status not in _WORTH_ANOTHER_TRY
            return self._failed(f"answered with status {status}: {said}", "unavailable", final=final)
        try:
            answer = msgspec.json.decode(content, type=_Answer)
        except msgspec.DecodeError as error:
            return self._failed(f'answered something else than {{"rewards": [...]}}: {error}', "invalid")
        return checked(answer.rewards, count)

    def _failed(self, problem: str, reason: Failure, *, final: bool = False) -> Scores:
        return Scores(None, problem, reason, is_final=final)
