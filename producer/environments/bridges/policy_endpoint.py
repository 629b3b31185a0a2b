"""The requests of an agent program to its producer: it takes tasks and ends episodes (docs/serving.md).

Guarantee: a request that may succeed at another attempt is repeated with growing pauses. A task that is over raises
`TaskOverError`.
"""

import asyncio
import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_WAIT_S = 30.0  # for a task
_TIMEOUT_S = 30.0  # of a request, what it waits for a task not counted
_ATTEMPTS = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_LARGEST_REWARD = 1e30


class TaskOverError(Exception):
    """The producer does not know the episode any more: its task was closed, or belongs to another process."""


class RefusedByProducerError(Exception):
    """The producer refused a request; the text has its reason."""


class PolicyEndpoint:
    """The endpoint at `base_url`, which ends in `/v1`.

    Args:
        num_threads: requests at once; one of them waits for tasks.
    """

    def __init__(self, base_url: str, key: str, num_threads: int) -> None:
        self._base_url = base_url
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._threads = ThreadPoolExecutor(num_threads)

    async def take(self) -> dict[str, Any] | None:
        """Returns a task; None if there is none now."""
        return await self._ask("/rollouts", {"wait_s": _WAIT_S}, _WAIT_S + _TIMEOUT_S)

    async def reward(self, episode: str, rewards: Mapping[str, Any]) -> None:
        """Ends an episode. A reward that is no finite number is missing."""
        await self._ask(f"/rollouts/{episode}/reward", {name: _number(value) for name, value in rewards.items()})

    async def fail(self, episode: str, reason: str) -> None:
        """Ends an episode that cannot be rewarded."""
        await self._ask(f"/rollouts/{episode}/failure", {"reason": reason})

    async def _ask(self, path: str, body: Mapping[str, Any], timeout_s: float = _TIMEOUT_S) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
            problem: Exception
            try:
                return await loop.run_in_executor(self._threads, self._post, path, body, timeout_s)
            except urllib.error.HTTPError as error:
                said = error.read(4096).decode(errors="replace")
                error.close()
                if error.code == 404 and "unknown_episode" in said:
                    raise TaskOverError from None
                problem = RefusedByProducerError(f"{path}: status {error.code}: {said}")
                if error.code not in _TRANSIENT:
                    raise problem from None
            except (OSError, http.client.HTTPException) as error:
                problem = RefusedByProducerError(f"{self._base_url}{path}: {error}")
        raise problem

    def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        data = json.dumps(body, allow_nan=False).encode()
        request = urllib.request.Request(self._base_url + path, data, self._headers)  # noqa: S310 - of our producer
        with self._opener.open(request, timeout=timeout_s) as answer:
            content = answer.read()
        return json.loads(content) if content else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < _LARGEST_REWARD else None
