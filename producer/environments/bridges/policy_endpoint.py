"""The requests of an agent program to its producer: it takes tasks and ends episodes (docs/serving.md).

Guarantee: a request that may succeed at another attempt is repeated with growing pauses. A task that is over raises
`TaskOverError`.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

from producer.environments.bridges.http_client import HttpClient

_WAIT_S = 30.0  # for a task
_TIMEOUT_S = 30.0  # of a request, what it waits for a task not counted
_ATTEMPTS = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_SHOWN_BYTES = 4096
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
        self._http = HttpClient(num_threads, {"authorization": f"Bearer {key}"} if key else {})

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
        url, problem = self._base_url + path, ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
            try:
                status, content = await self._http.ask(url, json.dumps(body).encode(), timeout_s)
            except OSError as error:
                problem = f"{url}: {error}"
                continue
            if status < 300:
                return json.loads(content) if content else None
            said = content[:_SHOWN_BYTES].decode(errors="replace")
            if status == 404 and "unknown_episode" in said:
                raise TaskOverError
            problem = f"{path}: status {status}: {said}"
            if status not in _TRANSIENT:
                break
        raise RefusedByProducerError(problem)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < _LARGEST_REWARD else None
