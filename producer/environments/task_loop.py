"""The task loop of an agent program: takes tasks from a producer and plays their episodes, several at once (docs/serving.md).

Guarantee: every episode of a task ends with its rewards or with the reason for having none, unless its task is over before that.
An exception of an environment fails its episode and nothing else. A request to the producer that failed for a passing reason is
repeated with growing pauses. The module imports the standard library alone.
"""

import asyncio
import http.client
import json
import logging
import math
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, closing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_WAIT_S = 30.0  # for a task
_TIMEOUT_S = 30.0  # of a request, what it waits for a task not counted
_ATTEMPTS = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_MAX_ERROR_BYTES = 4096
_LARGEST_REWARD = 1e30
_PAUSE_S = 2.0
_LONGEST_REASON = 1000  # characters
_LONGEST_ANSWER_BYTES = 64 * 2**20
_PIECE_BYTES = 2**16
_JSON = {"content-type": "application/json"}


class Environment(Protocol):
    """The environment that a plugin returns: the rows of its dataset, and its episodes."""

    def rows(self, max_rows: int | None) -> Iterator[dict[str, Any]]:
        """Yield the rows of the dataset, at most `max_rows`: a `prompt`, and the columns that `play` needs."""

    def playing(self, base_url: str, key: str) -> AbstractAsyncContextManager[None]:
        """Return the context in which episodes are played, with the policy at `base_url`."""

    async def play(self, task: dict[str, Any], episode: str) -> Mapping[str, Any]:
        """Play one episode and return rewards by name; those that the task asks for are posted."""

    async def problem(self) -> str:
        """Return why no episode can be played now, or an empty text."""


class TaskOverError(Exception):
    """The episode is unknown to the producer: its task was closed, or belongs to another process."""


class FailedError(Exception):
    """An episode failed, or the producer refused a request; the text has the reason."""


class HttpClient:
    """HTTP with the standard library, for `num_threads` requests at once. An answer is bounded in bytes and in time; no proxy is
    used, and no redirect is followed."""

    def __init__(self, num_threads: int, headers: dict[str, str] | None = None) -> None:
        self._headers = _JSON | (headers or {})
        self._threads, self._free = ThreadPoolExecutor(num_threads), asyncio.Semaphore(num_threads)

    async def ask(self, url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST, or to a GET if `body` is None. Raise OSError if the answer is
        incomplete, too long or too late. A cancellation ends the request and frees its thread."""
        exchange, loop = _Exchange(url, timeout_s), asyncio.get_running_loop()
        async with self._free:
            timer = loop.call_later(timeout_s, exchange.end)
            try:
                return await loop.run_in_executor(self._threads, exchange.run, body, self._headers)
            finally:
                timer.cancel()
                exchange.end()


class _Exchange:
    """A request and its answer, which another thread may end."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url, self._timeout_s = url, timeout_s
        self._target = parts._replace(scheme="", netloc="").geturl() or "/"
        self._connection = kind(parts.netloc, timeout=timeout_s)
        self._socket: socket.socket | None = None
        self._is_over = False

    def end(self) -> None:
        self._is_over = True
        if self._socket is not None:
            with suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            with closing(self._connection):
                self._connection.connect()
                self._socket = self._connection.sock
                if self._is_over:
                    raise TimeoutError
                return self._answered(body, headers)
        except (http.client.HTTPException, OSError) as error:
            if self._is_over:
                raise TimeoutError(f"{self._url} did not finish its answer within {self._timeout_s:g} s") from None
            if isinstance(error, OSError):
                raise
            raise OSError(f"{self._url}: {type(error).__name__}: {error}") from None

    def _answered(self, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        content = bytearray()
        self._connection.request("GET" if body is None else "POST", self._target, body, headers)
        with self._connection.getresponse() as answer:
            while not self._is_over and (piece := answer.read1(_PIECE_BYTES)):
                content += piece
                if len(content) > _LONGEST_ANSWER_BYTES:
                    raise OSError(f"{self._url} answered with more than {_LONGEST_ANSWER_BYTES} bytes")
            if answer.length or self._is_over:
                raise OSError(f"{self._url} ended its answer {answer.length} bytes early")
            return answer.status, bytes(content)


class PolicyEndpoint:
    """The endpoint at `base_url`, which ends in `/v1`, for `num_threads` requests at once. One of them waits for tasks, of
    `environment` if the run has several."""

    def __init__(self, base_url: str, key: str, num_threads: int, environment: str = "") -> None:
        self._base_url = base_url
        self._wish = {"wait_s": _WAIT_S} | ({"environment": environment} if environment else {})
        self._http = HttpClient(num_threads, {"authorization": f"Bearer {key}"} if key else {})

    async def take(self) -> dict[str, Any] | None:
        """Return a task, or None if there is none now."""
        return await self._ask("", self._wish, _WAIT_S + _TIMEOUT_S)

    async def reward(self, episode: str, rewards: Mapping[str, Any]) -> None:
        """End an episode. A reward that is neither a finite number nor rewards of spans is missing."""
        posted = {name: value if isinstance(value, dict) else finite(value) for name, value in rewards.items()}
        await self._ask(f"/{episode}/reward", posted)

    async def fail(self, episode: str, reason: str) -> None:
        """End an episode that cannot be rewarded."""
        await self._ask(f"/{episode}/failure", {"reason": reason})

    async def _ask(self, path: str, body: Mapping[str, Any], timeout_s: float = _TIMEOUT_S) -> dict[str, Any] | None:
        url, problem = f"{self._base_url}/rollouts{path}", ""
        try:
            sent = json.dumps(body).encode()
        except (TypeError, ValueError, RecursionError) as error:  # rewards of spans are the environment's own
            raise FailedError(f"/rollouts{path} cannot be sent: {error}") from None
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
            try:
                status, content = await self._http.ask(url, sent, timeout_s)
            except OSError as error:
                problem = f"{url}: {error}"
                continue
            if status < 300:
                return json.loads(content) if content else None
            text = content[:_MAX_ERROR_BYTES].decode(errors="replace")
            if status == 404 and "unknown_episode" in text:
                raise TaskOverError
            problem = f"/rollouts{path}: status {status}: {text}"
            if status not in _TRANSIENT:
                break
        raise FailedError(problem)


@dataclass
class TaskLoop:
    """Plays the episodes of task after task. `slots` bound the episodes that are played at once."""

    endpoint: PolicyEndpoint
    environment: Environment
    slots: asyncio.Semaphore
    episode_timeout_s: float
    _named: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Play until cancelled."""
        async with asyncio.TaskGroup() as playing:
            while True:
                async with self.slots:  # there is room for an episode
                    pass
                try:
                    if problem := await self.environment.problem():
                        raise FailedError(problem)
                    task = await self.endpoint.take()
                except FailedError as error:
                    logger.warning("no task: %s; asking again in %g s", error, _PAUSE_S)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if task is not None:
                    ends_at = asyncio.get_running_loop().time() + task["expires_in_s"]
                    for episode in task["episodes"]:
                        playing.create_task(self._episode(task, episode, ends_at))

    async def _episode(self, task: dict[str, Any], episode: str, ends_at: float) -> None:
        async with self.slots:
            try:
                try:
                    await self.endpoint.reward(episode, await self._played(task, episode, ends_at))
                except FailedError as error:  # such as: nothing was sampled
                    logger.warning("episode %s failed: %s", episode, error)
                    await self.endpoint.fail(episode, str(error))
            except TaskOverError:
                logger.info("episode %s: its task is over", episode)
            except FailedError as error:
                logger.warning("episode %s: %s", episode, error)

    async def _played(self, task: dict[str, Any], episode: str, ends_at: float) -> dict[str, Any]:
        """Return the episode's rewards. Raise FailedError with the reason if it failed."""
        limit_s = min(self.episode_timeout_s, ends_at - asyncio.get_running_loop().time())
        if limit_s <= 0:
            raise TaskOverError
        try:
            async with asyncio.timeout(limit_s) as limit:
                found = dict(await self.environment.play(task, episode))
        except (Exception, SystemExit) as error:
            logger.debug("episode %s", episode, exc_info=True)
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON].encode(errors="replace").decode()
            if limit.expired():
                reason = f"it was not over within environment.episode_timeout_s={self.episode_timeout_s:g} seconds"
            raise FailedError(reason) from None
        for name in set(task["rewards"]) - found.keys() - self._named:
            self._named.add(name)
            logger.warning("reward %s is missing: there are %s", name, ", ".join(sorted(found)) or "none")
        return {name: found.get(name) for name in task["rewards"]}


def finite(value: Any) -> float | None:
    """Return a reward as it is posted, or None, which means missing, if it is no finite number."""
    try:
        number = float(value)
    except Exception:  # such as that of a tensor of several elements
        return None
    return number if math.isfinite(number) and abs(number) < _LARGEST_REWARD else None
