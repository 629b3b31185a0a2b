"""Environments of the verifiers library, played by the agent program: through the endpoint, and in a run of both daemons."""

import asyncio
import contextlib
import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from producer.environments.agent_program import AgentProgram, rows
from producer.groups import Episode
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from slipstream.cli import run as slipstream
from slipstream_extras.endpoint.agents import Agents
from tests.integration.pair import Daemon, end_well
from tests.integration.test_pair import read_steps, write_run
from tests.scripted_policy import ScriptedPolicy, endpoint, lease_of, numbers_in
from tests.tools import python_with

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ENVIRONMENTS = Path(__file__).parent / "other_environments"


@pytest.fixture(params=["stand-in", "installed"])
def section(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSection:
    """The doubling environment."""
    places = [str(ENVIRONMENTS)]
    verifiers: dict[str, Any] = {"id": "owner/doubling", "arguments": {"taskset": {"numbers": 3}}}
    if request.param == "stand-in":
        places.append(str(ENVIRONMENTS / "standin"))
    else:
        verifiers["python"] = python_with("verifiers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    return EnvironmentSection.model_validate({"agent": "verifiers", "options": verifiers, "episode_timeout_s": 30})


def third_time_right(messages: list[dict[str, Any]]) -> str:
    """Of odd numbers; of even ones the first time."""
    (number,) = numbers_in(messages[1]["content"])
    is_right = number % 2 == 0 or len(messages) >= 6
    return str(2 * number if is_right else "dunno")


def test_episodes_of_several_turns_are_played_recorded_and_rewarded(section: EnvironmentSection, tmp_path: Path):
    async def body() -> None:
        table = [row async for row in rows(section, None, "")]
        assert [numbers_in(row["prompt"][1]["content"]) for row in table] == [[0], [1], [2]]
        assert table[0]["prompt"][0] == {"role": "system", "content": "Only numbers."}

        policy = ScriptedPolicy(third_time_right)
        agents = Agents(("turns", "nothing", "environment"))
        async with endpoint(tmp_path, policy, agents) as url:
            program = AgentProgram(section, url, "")
            await program.start()
            playing = asyncio.create_task(program.run())
            try:
                leases = [lease_of(row, number) for number, row in enumerate(table)]
                done = await asyncio.gather(*map(agents.fulfil, leases))
            finally:
                await program.close()
                await playing  # another is not started
        turns = [1.0, 3.0, 1.0]
        for number, (episodes, rewards, _) in enumerate(done):
            np.testing.assert_array_equal(rewards, np.array([[turns[number], np.nan, 1.0]] * 2, "f4"))
            assert [conversation(episode) for episode in episodes] == [expected(number)] * 2
        assert agents.rewarded == 6
        assert {request.fields["temperature"] for request in policy.requests} == {0.7}

    asyncio.run(asyncio.wait_for(body(), 240))


def conversation(episode: Episode) -> list[tuple[bool, str]]:
    """The one record of an episode in pieces: whether the policy said it."""
    (record,) = episode.records
    pieces: list[tuple[bool, str]] = []
    for token, sampled in zip(record.token_ids, record.is_sampled.tolist(), strict=True):
        if pieces and pieces[-1][0] == sampled:
            pieces[-1] = (sampled, pieces[-1][1] + chr(token))
        else:
            pieces.append((sampled, chr(token)))
    return pieces


def expected(number: int) -> list[tuple[bool, str]]:
    begins = (False, f"s:Only numbers.\nu:double {number}\na:")
    again = (False, "u:no, again\na:")
    answer = (True, f"{2 * number}\n")
    return [begins, answer] if number % 2 == 0 else [begins, (True, "dunno\n"), again, (True, "dunno\n"), again, answer]


@pytest.mark.parametrize(
    ("verifiers", "said"),
    [
        (
            {"id": "owner/no-such"},
            r"environment\.options\.id: .*python\S* has no module no_such; install the environment there",
        ),
        (
            {"id": "doubling", "arguments": {"taskset": {"nmbers": 3}}},
            r"environment\.options\.arguments: .*'nmbers'",
        ),
        ({"id": "made-before"}, r"options\.id: made-before was made for verifiers before 0\.4; port it to a taskset"),
        (
            {"id": "antigravity-free", "python": "/no/python"},
            r"environment\.options\.python: /no/python is no program",
        ),
        ({"id": "any", "python": "false"}, r"the agent program failed: .*\(exit status 1\); its last output is above"),
    ],
)
def test_what_cannot_be_played_is_said_before_the_engine_is_loaded(
    verifiers: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "made_before.py").write_text("def load_environment(): ...")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ENVIRONMENTS, ENVIRONMENTS / "standin", tmp_path))))
    with pytest.raises(ConfigError, match=said):
        asyncio.run(
            AgentProgram(
                EnvironmentSection.model_validate({"agent": "verifiers", "options": verifiers}), "", ""
            ).start()
        )


def test_a_python_without_verifiers_or_with_an_old_release_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    section = EnvironmentSection.model_validate({"agent": "verifiers", "options": {"id": "any"}})
    where = rf"environment\.options\.python: {sys.executable} has"
    with pytest.raises(ConfigError, match=f"{where} no verifiers; install it"):
        asyncio.run(AgentProgram(section, "", "").start())
    (tmp_path / "verifiers.py").write_text("__version__ = '0.3.1'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{where} verifiers 0\.3\.1; install 0\.4 or newer there"):
        asyncio.run(AgentProgram(section, "", "").start())


def test_a_run_learns_from_episodes_and_a_killed_agent_program_is_started_again(
    short_dir: Path, daemons: list[Daemon], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ENVIRONMENTS, ENVIRONMENTS / "standin"))))
    arguments = {"taskset": {"numbers": 20, "rewards_length": True}}
    config = str(
        write_run(
            short_dir,
            "llama",
            [],
            "def unused(**_): ...",
            rewards={"functions": [{"posted": "turns", "weight": 0.0}]},
            environment={"agent": "verifiers", "options": {"id": "doubling", "arguments": arguments}},
            serve={"enabled": True, "max_requests": 32},
            pipeline={"max_staleness": 1},  # after step 1 there are always episodes to come
            sampling={"num_generations": 4, "max_completion_length": 200},
            engine={"max_model_len": 512, "max_num_seqs": 32, "enforce_eager": True},
            trainer={"max_steps": 3, "save_steps": 100, "learning_rate": 1e-3},
        )
    )
    ends = {"eos_token_id": [1, *range(60, 120)], "pad_token_id": 0}  # of the model's 400 or so tokens: turns are short
    (short_dir / "model" / "generation_config.json").write_text(json.dumps(ends))
    assert slipstream(["environment", "rows", "--config", config, "--to", str(short_dir / "data.jsonl")]) == 0
    producer = Daemon("producer.app.cli", short_dir / "producer.log", "--config", config)
    daemons.append(producer)
    producer.wait_for("engine ready")
    trainer = Daemon("consumer.app.cli", short_dir / "trainer.log", "--config", config)
    daemons.append(trainer)
    trainer.wait_for(r"step 1/", beside=producer)
    commands: dict[psutil.Process, str] = {}
    for child in producer.family():
        with contextlib.suppress(psutil.Error):  # it may have ended
            commands[child] = " ".join(child.cmdline())
    (program,) = [
        child
        for child, said in commands.items()
        if "slipstream_extras.environments" in said and "keeper.py" not in said
    ]
    program.kill()
    producer.wait_for(r"the agent program of environment ended \(killed by SIGKILL\); starting another in 1 s")
    end_well(trainer, producer)
    assert producer.output.count("; starting another in") == 1, "the one that was killed"
    steps = read_steps(short_dir)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[-1]["counts"]["trained"] == 12
    assert all(1 < line["rewards/turns/mean"] <= 3 for line in steps), "episodes have several turns"
    assert all(line["rewards/environment/std"] > 0 for line in steps)
    with contextlib.closing(sqlite3.connect(f"file:{short_dir}/run/journal.sqlite?mode=ro", uri=True)) as connection:
        assert connection.execute("SELECT count(*) FROM groups WHERE step IS NOT NULL").fetchone() == (12,)
