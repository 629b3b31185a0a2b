"""Environments of verifiers before release 0.4, which have `load_environment`.

Guarantee: as `producer.environments.bridges.verifiers_program`.
"""

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import verifiers as vf
from verifiers.types import ClientConfig

from producer.environments.bridges.program import ProblemError, row_of
from producer.environments.bridges.verifiers_program import API_KEY_VARIABLE


class ClassicEnvironment:
    """What `load_environment(id, **arguments)` returns."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            self._env = vf.load_environment(name, **arguments)
        except TypeError as error:
            raise ProblemError(f"environment.verifiers.arguments: {error}") from error
        if self._env.requires_group_rollouts:
            raise ProblemError(
                f"environment.verifiers.id: {name} scores the completions of a prompt by one another, which is not supported"
            )

    def rows(self, _max_rows: int | None) -> Iterator[dict[str, Any]]:
        for row in self._env.get_dataset():
            prompt = row["prompt"]
            messages = prompt if isinstance(prompt, str) else [_plain(message) for message in prompt]
            answer = {"answer": row["answer"]} if isinstance(row.get("answer"), str) else {}
            yield {"prompt": messages, "task": json.dumps(row, default=str)} | answer

    @asynccontextmanager
    async def playing(self, base_url: str, key: str) -> AsyncIterator["ClassicPlayer"]:
        os.environ[API_KEY_VARIABLE] = key or "none"
        yield ClassicPlayer(self._env, base_url)


class ClassicPlayer:
    """Plays one rollout at a time per call."""

    def __init__(self, env: Any, base_url: str) -> None:
        self._env = env
        self._base_url = base_url

    async def problem(self) -> str:
        return ""

    async def play(self, task: dict[str, Any], episode: str) -> dict[str, float | None]:
        """The rubric's reward as `environment`, and every metric under its own name."""
        client = ClientConfig(
            api_base_url=self._base_url, api_key_var=API_KEY_VARIABLE, extra_headers={"x-episode": episode}
        )
        output = await self._env.run_rollout(row_of(task), client, "policy", {})
        if error := output.get("error"):
            raise RuntimeError(str(error))
        return dict(output.get("metrics") or {}) | {"environment": output["reward"]}


def _plain(message: Any) -> dict[str, str]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return {"role": message["role"], "content": text}
