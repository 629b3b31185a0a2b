"""The worker of examples/harbor with the real Harbor: its agent terminus-2 types into a real tmux, its verifier judges."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.groups import Episode
from slipstream_extras.endpoint.agents import Agents
from tests.scripted_policy import ScriptedPolicy, endpoint, lease_of
from tests.tools import python_with, require

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
VERIFIER = """#!/bin/bash
while [ ! -s /app/answer.txt ]; do sleep 0.1; done # the shell may be slow
[ "$(cat /app/answer.txt)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt
"""


def write_task(folder: Path) -> Path:
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("Write the double of 21 into /app/answer.txt.")
    (folder / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 100.0\n')
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_text(VERIFIER)
    return folder


def test_terminus_types_and_the_verifier_rewards(tmp_path: Path) -> None:
    for tool, package in (("bwrap", "bubblewrap"), ("tmux", "tmux")):
        require(tool, package)
    python, task, begun = python_with("harbor", (3, 12)), write_task(tmp_path / "task"), []

    def say(messages: list[dict[str, Any]]) -> str:
        is_first = len(messages) == 1
        if is_first:
            begun.append(messages)
        typed = f"echo {2 * (20 + len(begun))} > /app/answer.txt\n"  # 42 in one of two episodes
        commands = [{"keystrokes": typed, "duration": 0.1}]
        said = {"analysis": "", "plan": "", "commands": commands if is_first else [], "task_complete": not is_first}
        return json.dumps(said)

    async def body() -> tuple[list[Episode], Any]:
        agents = Agents(("solved",))
        async with endpoint(tmp_path, ScriptedPolicy(say), agents) as url:
            command = ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent"]
            command += [python, "examples/harbor/worker.py", url.removesuffix("/v1")]
            command += ["--sandbox", "harbor_sandbox:Sandbox", "--trials", str(tmp_path / "trials")]
            places = {"PYTHONPATH": "tests/integration/other_environments", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            worker = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, env=os.environ | places)
            try:
                lease = lease_of({"prompt": [], "task": str(task)}, 0, timeout_s=250.0)
                episodes, rewards, _ = await agents.fulfil(lease)
            finally:
                worker.kill()
                await worker.wait()
        return episodes, rewards

    episodes, rewards = asyncio.run(body())
    assert sorted(rewards[:, 0].tolist()) == [0.0, 1.0]
    for episode in episodes:
        (record,) = episode.records
        text = "".join(map(chr, record.token_ids))
        assert (text.count("\na:"), text.count("21 into /app/answer.txt")) == (3, 1)
        np.testing.assert_array_equal(record.logprobs[record.is_sampled], -0.5)
