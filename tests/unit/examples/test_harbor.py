"""The worker of examples/harbor at a producer's endpoint, with a stand-in for Harbor that has its classes and asks the URL."""

import argparse
import asyncio
import contextlib
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from slipstream_extras.endpoint.agents import Agents
from tests.scripted_policy import ScriptedPolicy, endpoint, lease_of
from tests.unit.producer.loop import asynchronous


class Trial:
    """In place of `harbor.trial.trial.Trial`: its agent asks twice, and its verifier wants a right answer."""

    seen: list[Any] = []

    def __init__(self, config: Any) -> None:
        self._config = config

    @classmethod
    async def create(cls, config: Any) -> "Trial":
        cls.seen.append(config)
        return cls(config)

    async def run(self) -> Any:
        config, asked = self._config, self._config.agent.kwargs
        if config.trial_name.endswith(".2"):
            return SimpleNamespace(verifier_result=None, exception_info=SimpleNamespace(exception_message="no sandbox"))
        task = (config.task.path / "instruction.md").read_text()
        if task == "ask nothing":
            return SimpleNamespace(verifier_result=SimpleNamespace(rewards={"reward": 0.0}), exception_info=None)
        messages: list[Any] = [{"role": "user", "content": task}]
        async with openai.AsyncOpenAI(base_url=asked["api_base"], api_key="none", max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        reward = math.nan if task == "divide" else float(said == "4" and config.trial_name.endswith(".1"))
        return SimpleNamespace(verifier_result=SimpleNamespace(rewards={"reward": reward}), exception_info=None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = {name: ModuleType(name) for name in ("harbor", "harbor.models", "harbor.models.trial", "harbor.trial")}
    config = modules["harbor.models.trial.config"] = ModuleType("harbor.models.trial.config")
    for name in ("AgentConfig", "EnvironmentConfig", "TaskConfig", "TrialConfig"):
        setattr(config, name, SimpleNamespace)
    trial = modules["harbor.trial.trial"] = ModuleType("harbor.trial.trial")
    monkeypatch.setattr(trial, "Trial", Trial, raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Trial, "seen", [])
    monkeypatch.delitem(sys.modules, "examples.harbor.worker", raising=False)
    yield importlib.import_module("examples.harbor.worker")
    sys.modules.pop("examples.harbor.worker", None)


@pytest.mark.long
@asynchronous
async def test_a_worker_plays_a_task_and_posts_its_rewards(worker: Any, tmp_path: Path, capsys: Any) -> None:
    def task_of(instruction: str, name: str = "other") -> str:
        folder = tmp_path / name / instruction.partition(" ")[0]
        folder.mkdir(parents=True)
        (folder / "instruction.md").write_text(instruction)
        return str(folder)

    task_of("double 2", "tasks")
    worker.rows(tmp_path / "tasks")
    row = json.loads(capsys.readouterr().out)
    assert row["prompt"] == "double 2"
    policy, agents = ScriptedPolicy(lambda said: "4" if len(said) == 3 else "5"), Agents(("solved",))
    options = argparse.Namespace(
        agent="terminus-2", sandbox="own:Sandbox", trials=str(tmp_path), max_tokens=100, places=1
    )
    async with endpoint(tmp_path, policy, agents) as base_url:
        options.address = base_url.removesuffix("/v1")
        working = asyncio.create_task(worker.main(options))
        episodes, rewards, _ = await agents.fulfil(lease_of(row | {"prompt": []}, 0, num_generations=2))
        with pytest.raises(Exception, match="no sandbox"):
            await agents.fulfil(lease_of(row | {"prompt": []}, 1, num_generations=3))
        with pytest.raises(Exception, match="failed before anything was sampled"):
            await agents.fulfil(lease_of(row | {"prompt": [], "task": task_of("ask nothing")}, 2, num_generations=2))
        odd, _, _ = await agents.fulfil(lease_of(row | {"prompt": [], "task": task_of("divide")}, 3, num_generations=2))
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    np.testing.assert_array_equal(rewards, [[0.0], [1.0]])
    assert all(episode.failure for episode in odd), "nan is no reward"
    for episode in episodes:
        (record,) = episode.records
        assert "".join(map(chr, record.token_ids)) == "u:double 2\na:5\nu:go on\na:4\n"
    first = Trial.seen[0]
    assert (first.agent.name, first.environment.import_path) == ("terminus-2", "own:Sandbox")
    assert first.agent.kwargs["model_info"]["max_output_tokens"] == 1000
