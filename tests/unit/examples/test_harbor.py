"""The worker of examples/harbor at a producer's endpoint, with a stand-in for Harbor that has its classes and asks the URL."""

import argparse
import asyncio
import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from producer.endpoint.agents import Agents
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
        messages: list[Any] = [{"role": "user", "content": (config.task.path / "instruction.md").read_text()}]
        async with openai.AsyncOpenAI(base_url=asked["api_base"], api_key="none", max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        reward = float(said == "4" and config.trial_name.endswith(".1"))
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
    (tmp_path / "tasks" / "double").mkdir(parents=True)
    (tmp_path / "tasks" / "double" / "instruction.md").write_text("double 2")
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
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    np.testing.assert_array_equal(rewards, [[0.0], [1.0]])
    for episode in episodes:
        (record,) = episode.records
        assert "".join(map(chr, record.token_ids)) == "u:double 2\na:5\nu:go on\na:4\n"
    first = Trial.seen[0]
    assert (first.agent.name, first.environment.import_path) == ("terminus-2", "own:Sandbox")
    assert first.agent.kwargs["model_info"]["max_output_tokens"] == 1000
