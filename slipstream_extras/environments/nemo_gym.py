"""The plugin `nemo_gym`: an agent of NeMo Gym plays the episodes, by its `/run`.

Guarantee: a row goes to the agent as it is in the agent's own file, with two changes. The `metadata` of `responses_create_params`
names the episode: NeMo Gym's agents send it to their model server with every call, and `vllm_model` sends it on to the policy's
endpoint. Fields of sampling are left out. An answer is bounded in bytes and in time, and only its numbers are used.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from producer.environments.program import ProblemError, plain, row_of
from producer.environments.task_loop import HttpClient

_ALIVE_TIMEOUT_S = 10.0
_AS_THE_RUN_SAYS = ("temperature", "top_p", "max_output_tokens", "model")
_MAX_ERROR_CHARS = 500


def load(settings: dict[str, Any]) -> "NemoGymAgent":
    """Return the agent at `url`, with `episode_timeout_s` and `max_concurrent` as in the configuration. For rows, `source` is a
    file of the agent's rows. Raise ProblemError if no server answers there."""
    agent = NemoGymAgent(settings)
    if settings["kind"] == "play" and (problem := asyncio.run(agent.problem())):
        raise ProblemError(f"environment.options.url: {problem}; start NeMo Gym's servers first")
    return agent


class NemoGymAgent:
    """An agent server of NeMo Gym."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._url = settings["url"]
        self._source = settings.get("source", "")
        self._timeout_s = settings["episode_timeout_s"]
        self._http = HttpClient(settings["max_concurrent"])

    def rows(self, _max_rows: int | None) -> Iterator[dict[str, Any]]:
        if not self._source:
            raise ProblemError(
                "name the agent's rows: --from FILE.jsonl, which has `responses_create_params` in every line"
            )
        try:
            with Path(self._source).open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield {"prompt": _prompt(line, f"{self._source}:{number}"), "task": line.strip()}
        except OSError as error:
            raise ProblemError(f"--from {self._source}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ProblemError(f"--from {self._source}: not UTF-8: {error}") from error

    @asynccontextmanager
    async def playing(self, _base_url: str, _key: str) -> AsyncIterator[None]:
        yield

    async def problem(self) -> str:
        try:
            await self._http.ask(f"{self._url}/openapi.json", None, _ALIVE_TIMEOUT_S)
        except OSError as error:
            return f"nothing answers at {self._url}: {error}"
        return ""

    async def play(self, task: dict[str, Any], episode: str) -> dict[str, Any]:
        """Return the answer's `reward` as `environment`, and its other numbers under their own names."""
        row = row_of(task)
        wanted = {key: value for key, value in row["responses_create_params"].items() if key not in _AS_THE_RUN_SAYS}
        wanted["metadata"] = (wanted.get("metadata") or {}) | {"episode": episode}
        body = json.dumps(row | {"responses_create_params": wanted}).encode()
        status, answer = await self._http.ask(f"{self._url}/run", body, self._timeout_s)
        if status >= 300:  # each server quotes the answer of the one behind it, and doubles backslashes
            text = answer.decode(errors="replace").replace("\\", "")[:_MAX_ERROR_CHARS]
            raise RuntimeError(f"{self._url}/run: status {status}: {text}")
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise RuntimeError(f"{self._url}/run answered with no JSON: {error}") from None
        if not isinstance(found, dict) or not _is_number(found.get("reward")):
            raise RuntimeError(f"{self._url}/run answered without a number as `reward`")
        return {name: value for name, value in found.items() if _is_number(value)} | {"environment": found["reward"]}


def _prompt(line: str, place: str) -> list[dict[str, str]]:
    """Return the row's question as messages, for the rewards of the run and for readers."""
    try:
        asked = json.loads(line)["responses_create_params"]["input"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProblemError(f"{place}: a row of an agent is a JSON object with responses_create_params.input") from error
    if isinstance(asked, str) or asked == []:  # without a message the agent asks its environment
        asked = [{"role": "user", "content": asked}]
    items = asked if isinstance(asked, list) else []
    messages = [item for item in items if isinstance(item, dict) and isinstance(item.get("role"), str)]
    if not messages:
        raise ProblemError(f"{place}: responses_create_params.input has no message")
    return plain(messages)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
