"""The plugin `verifiers`: plays a taskset or environment of the verifiers library (`verifiers.v1`, from release 0.4 on).

Guarantee: the policy is trained on the episode's own model calls and on nothing else; its rewards are those of the
environment's own scoring. An episode fails if one of its agents is not to be trained but calls the policy, because its tokens
would be trained. A release of verifiers before 0.4, or an environment made for one, is refused with the reason.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from producer.environments.program import ProblemError, plain, row_of

_API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"  # verifiers keeps such names from the programs that it runs


def load(settings: dict[str, Any]) -> "TasksetEnvironment":
    """Return the environment of `id` and `arguments`, as in the configuration. Raise ProblemError if there is no such
    environment, or no verifiers that can play it."""
    place = f"environment.options.python: {sys.executable}"
    if importlib.util.find_spec("verifiers") is None:
        raise ProblemError(f"{place} has no verifiers; install it there, or name the Python that has it")
    import verifiers

    if tuple(map(int, re.findall(r"\d+", verifiers.__version__)[:2])) < (0, 4):
        raise ProblemError(f"{place} has verifiers {verifiers.__version__}; install 0.4 or newer there")
    name = settings["id"]
    if hasattr(_module(name), "load_environment"):
        raise ProblemError(f"environment.options.id: {name} was made for verifiers before 0.4; port it to a taskset")
    return TasksetEnvironment(name, settings["arguments"])


def _module(name: str) -> ModuleType:
    """Return the module of an id such as `owner/gsm8k-v1@1.2`, from verifiers' own tasksets if they have it."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    for place in (f"verifiers.v1.tasksets.{module}", module):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise ProblemError(f"environment.options.id: {name} cannot be imported: {error}") from error
    raise ProblemError(
        f"environment.options.id: {sys.executable} has no module {module}; install the environment there, or start the "
        "producer in the directory of the module"
    )


class TasksetEnvironment:
    """The environment of a taskset; `arguments` of its `[env]` block."""

    def __init__(self, taskset: str, arguments: Mapping[str, Any]) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        own = arguments.get("taskset") or {}
        try:
            config = resolve_env_config(dict(arguments) | {"taskset": own | {"id": taskset}})
        except (ValueError, TypeError) as error:
            raise ProblemError(f"environment.options.arguments: {error}") from error
        for place, owner in {"": config, **agent_config_fields(config)}.items():
            if owner.retries.max_retries or owner.retries.rules:
                raise ProblemError(
                    f"environment.options.arguments.{place and place + '.'}retries: an episode that is played again would be "
                    "trained twice; remove them"
                )
        self._env = load_environment(config)
        self._task_class = type(self._env.taskset).task_type()
        self._base_url = ""

    def rows(self, max_rows: int | None) -> Iterator[dict[str, Any]]:
        if max_rows is None and not self._env.taskset.bounded:
            raise ProblemError("environment.options: its tasks have no end; set the number of rows: --max-rows N")
        for task in self._env.taskset:
            row = task.data.model_dump(mode="json")  # null fields included, which a field without a default needs
            system, asked = row.get("system_prompt"), row.get("prompt") or ""
            messages = [{"role": "system", "content": system}] if system else []
            messages += asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
            yield {"prompt": plain(messages), "task": json.dumps(row)}

    @asynccontextmanager
    async def playing(self, base_url: str, key: str) -> AsyncIterator[None]:
        os.environ[_API_KEY_VARIABLE], self._base_url = key or "none", base_url
        async with self._env.serving():
            yield

    async def problem(self) -> str:
        return ""

    async def play(self, task: dict[str, Any], episode: str) -> dict[str, float | None]:
        """Return the mean of the policy's agents' rewards as `environment`, and every reward and metric under its own name."""
        import verifiers.v1 as vf

        data = self._task_class.data_type().model_validate(row_of(task))
        client = vf.EvalClientConfig(
            base_url=self._base_url, api_key_var=_API_KEY_VARIABLE, headers={"x-episode": episode}
        )
        context = vf.ModelContext(model="policy", client=client)
        (slot,) = self._env.slots(self._task_class(data, self._env.config.taskset.task))
        done = await self._env.run_slot(slot, context)
        if not done.ok:
            errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it did not succeed")
        for trace in done.traces:
            agent = trace.agent
            if not agent.trainable and agent.config.client.headers.get("x-episode") == episode:
                raise RuntimeError(
                    f"agent {agent.name} is not to be trained, but calls the policy; name a model and a client for it: "
                    f"environment.options.arguments.{agent.name}"
                )
        return rewards_of([trace for trace in done.traces if trace.agent.trainable])


def rewards_of(traces: list[Any]) -> dict[str, float | None]:
    """Return the mean over traces of the total reward, of each reward before its weight, and of each metric; None where a trace
    was not scored."""
    found: dict[str, list[float | None]] = {}
    for trace in traces:
        scores = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
        total = None if None in scores.values() else trace.reward
        for name, value in (trace.metrics | scores | {"environment": total}).items():
            found.setdefault(name, []).append(value)
    given = {name: [value for value in values if value is not None] for name, values in found.items()}
    return {name: sum(values) / len(traces) if len(values) == len(traces) else None for name, values in given.items()}
