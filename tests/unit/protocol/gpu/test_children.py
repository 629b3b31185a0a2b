"""Processes that run code of the user's do not see the GPUs of their daemon, unless the configuration gives them one."""

import asyncio
import logging
from typing import Any

import pytest

from producer.environments import agent_program
from producer.environments.contract import EnvironmentFailedError
from producer.environments.pool import EnvironmentPool
from producer.rewards.services import WorkerReward, sources_of
from protocol.config.rewards import EnvironmentSection, RewardsSection
from protocol.errors import ConfigError
from protocol.runtime import child
from protocol.runtime.child import ChildEndedError, ChildProcesses
from protocol.runtime.logs import Throttle
from tests.unit.producer.loop import asynchronous

with_and_without = pytest.mark.parametrize(("settings", "seen"), [({}, ""), ({"gpu": 1}, "1")])


@pytest.fixture
def seen_by_children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each child that is started, and then is not."""
    found: list[str] = []

    def start(*_: Any, env: dict[str, str], **__: Any) -> None:
        assert env["PATH"]
        found.append(env["CUDA_VISIBLE_DEVICES"])
        raise OSError("seen")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(child, "KeptProcess", start)
    return found


@asynchronous
async def test_a_child_has_none(seen_by_children: list[str]) -> None:
    with pytest.raises(ChildEndedError):
        ChildProcesses(Throttle(logging.getLogger())).start("some.module", source="")
    assert seen_by_children == [""]


@with_and_without
@asynchronous
async def test_rewards(seen_by_children: list[str], settings: dict[str, Any], seen: str) -> None:
    section = RewardsSection.model_validate({"functions": [{"function": "rewards:score"}]} | settings)
    [source] = sources_of(section)
    assert isinstance(source, WorkerReward)
    with pytest.raises(ConfigError):
        await source.workers.start()
    assert set(seen_by_children) == {seen}


@with_and_without
@asynchronous
async def test_environments(seen_by_children: list[str], settings: dict[str, Any], seen: str) -> None:
    pool = EnvironmentPool(EnvironmentSection.model_validate({"factory": "game:Game"} | settings))
    with pytest.raises(EnvironmentFailedError):
        async with pool.session():
            pass
    assert seen_by_children == [seen]


@with_and_without
def test_agent_programs(seen_by_children: list[str], settings: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError, match="seen"):
        asyncio.run(
            agent_program._start(
                EnvironmentSection.model_validate({"agent": "verifiers", "options": {"id": "x"}} | settings), {}
            )
        )
    assert seen_by_children == [seen]
