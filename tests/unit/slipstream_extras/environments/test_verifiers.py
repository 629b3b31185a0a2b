"""Rows of a taskset of verifiers, without the library."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from slipstream_extras.environments.verifiers import TasksetEnvironment


class Data(BaseModel):
    """As that of verifiers' own `openenv`, `env` has no default."""

    env: str | None
    prompt: str | list[dict[str, Any]] | None = None
    system_prompt: str | None = None


class Taskset:
    bounded = True

    def __iter__(self) -> Iterator[Any]:
        for data in (Data(env=None), Data(env="x", prompt="1+1", system_prompt="Add.")):
            yield type("Task", (), {"data": data})


def test_a_task_comes_back_as_it_was_with_what_is_null_in_it() -> None:
    environment = TasksetEnvironment.__new__(TasksetEnvironment)
    environment._env = type("Env", (), {"taskset": Taskset()})
    first, second = environment.rows(None)
    assert Data.model_validate(json.loads(first["task"])) == Data(env=None)
    assert first["prompt"] == [{"role": "user", "content": ""}]
    assert Data.model_validate(json.loads(second["task"])).env == "x"
    assert second["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
