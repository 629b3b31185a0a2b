"""An agent of NeMo Gym plays: through the endpoint, and in a run of both daemons. Its servers are stand-ins, or the real ones."""

import asyncio
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.environments.agent_program import AgentProgram
from producer.groups import Record
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from slipstream.cli import run as slipstream
from slipstream_extras.endpoint.agents import Agents
from tests.integration.pair import Daemon, end_well
from tests.integration.test_pair import read_steps, write_run
from tests.nemo_gym_servers import Row, agent_server, ask_policy, real_servers, verified
from tests.scripted_policy import ScriptedPolicy, endpoint, lease_of, numbers_in
from tests.unit.protocol.channel_harness import reserve_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]

INSTALLED = os.environ.get("SLIPSTREAM_TEST_NEMO_GYM", "")
"""A Python with the real NeMo Gym."""


def row_of(number: int) -> Row:
    asked = [{"role": "user", "content": f"double {number}"}]
    return {"responses_create_params": {"input": asked, "temperature": 0.1}, "expected": 2 * number}


def played(base_url: str, row: Row) -> tuple[int, dict[str, str], bytes]:
    """The agent: it asks a second time when the answer is wrong; the reward is for being right, and for having written much."""
    create_params: Any = row["responses_create_params"]
    said: list[dict[str, Any]] = []
    for _ in range(2):
        answer = ask_policy(base_url, create_params, said)
        said += [{"role": "assistant", "content": answer, "tool_calls": []}, {"role": "user", "content": "no, again"}]
        if str(row["expected"]) in answer:
            break
    is_right = str(row["expected"]) in answer
    return verified(
        row, float(is_right) + 0.01 * sum(len(message["content"]) for message in said[::2]), turns=len(said) / 2
    )


def sampled_text(record: Record) -> str:
    return "".join(chr(token) for token, sampled in zip(record.token_ids, record.is_sampled, strict=True) if sampled)


def test_episodes_are_played_recorded_and_rewarded(tmp_path: Path):
    place = {"base_url": ""}

    def say(messages: list[dict[str, Any]]) -> str:
        (number,) = numbers_in(messages[0]["content"])
        return str(2 * number) if number == 1 or len(messages) == 3 else "no"

    async def body() -> None:
        policy, agents = ScriptedPolicy(say), Agents(("turns", "environment"))
        with agent_server(lambda row: played(place["base_url"], row)) as url:
            async with endpoint(tmp_path, policy, agents) as place["base_url"]:
                section = EnvironmentSection.model_validate({"agent": "nemo_gym", "options": {"url": url}})
                program = AgentProgram(section, place["base_url"], "")
                await program.start()
                playing = asyncio.create_task(program.run())
                try:
                    rows = [{"prompt": "unused", "task": json.dumps(row_of(number))} for number in (1, 2)]
                    leases = [lease_of(row, number) for number, row in enumerate(rows)]
                    (first, first_rewards, _), (second, second_rewards, _) = await asyncio.gather(
                        *map(agents.fulfil, leases)
                    )
                finally:
                    playing.cancel()
                    await program.close()
        np.testing.assert_allclose(first_rewards, [[1.0, 1.01]] * 2, rtol=1e-6)
        np.testing.assert_allclose(second_rewards, [[2.0, 1.03]] * 2, rtol=1e-6)
        assert ["".join(map(chr, episode.records[0].token_ids)) for episode in first] == ["u:double 1\na:2\n"] * 2
        (record,) = second[0].records
        assert sampled_text(record) == "no\n4\n"
        assert {request.fields["temperature"] for request in policy.requests} == {0.7}, "as the run says"

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.skipif(not INSTALLED, reason="set SLIPSTREAM_TEST_NEMO_GYM to a Python that has nemo-gym installed")
def test_the_real_servers_play_several_turns(short_dir: Path, stack: ExitStack):
    policy_port, agent_port, head_port = (reserve_port(stack) for _ in range(3))
    name = "example_multi_turn_gymnasium"
    agent = {
        "entrypoint": "app.py",
        "port": agent_port,
        "resources_server": {"type": "resources_servers", "name": name},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    config = {
        "policy_base_url": f"http://127.0.0.1:{policy_port}/v1",
        "policy_api_key": "none",
        "policy_model_name": "policy",
        "head_server": {"host": "127.0.0.1", "port": head_port},
        name: {"resources_servers": {name: {"entrypoint": "app.py", "domain": "other"}}},
        "agent": {"responses_api_agents": {"gymnasium_agent": agent}},
    }
    asked = {"input": "say it", "tool_choice": "auto", "max_output_tokens": 1, "metadata": {"level": "3"}}
    row = {"responses_create_params": asked, "follow_ups": ["again"], "expected_answer": "two"}

    async def body() -> None:
        policy = ScriptedPolicy(lambda messages: "two" if len(messages) == 3 else "one")
        agents = Agents(("terminated", "environment"))
        async with endpoint(short_dir, policy, agents, port=policy_port) as base_url:
            section = EnvironmentSection.model_validate(
                {"agent": "nemo_gym", "options": {"url": f"http://127.0.0.1:{agent_port}"}}
            )
            program = AgentProgram(section, base_url, "")
            await program.start()
            playing = asyncio.create_task(program.run())
            try:
                episodes, rewards, _ = await agents.fulfil(lease_of({"prompt": "unused", "task": json.dumps(row)}, 0))
            finally:
                playing.cancel()
                await program.close()
        np.testing.assert_array_equal(rewards, [[1.0, 1.0]] * 2)
        for episode in episodes:
            (record,) = episode.records
            assert "".join(map(chr, record.token_ids)) == "u:say it\na:one\nu:again\na:two\n"
            assert sampled_text(record) == "one\ntwo\n"
        assert [request.metadata["level"] for request in policy.requests] == ["3"] * 4

    with real_servers(
        INSTALLED, short_dir, config, f"resources_servers/{name}", "responses_api_agents/gymnasium_agent"
    ):
        asyncio.run(asyncio.wait_for(body(), 60))


def test_an_agent_that_is_not_there_is_said_before_the_engine_is_loaded(stack: ExitStack):
    url = f"http://127.0.0.1:{reserve_port(stack)}"
    section = EnvironmentSection.model_validate({"agent": "nemo_gym", "options": {"url": url}})
    with pytest.raises(ConfigError, match=rf"environment\.options\.url: nothing answers at {url}"):
        asyncio.run(AgentProgram(section, "", "").start())


def test_a_run_learns_from_episodes_of_an_agent_server(short_dir: Path, daemons: list[Daemon], stack: ExitStack):
    port = reserve_port(stack)
    with agent_server(lambda row: played(f"http://127.0.0.1:{port}/v1", row)) as url:
        config = str(
            write_run(
                short_dir,
                "llama",
                [],
                "def unused(**_): ...",
                rewards={"functions": [{"posted": "turns", "weight": 0.0}]},
                environment={"agent": "nemo_gym", "options": {"url": url}},
                serve={"enabled": True, "port": port, "max_requests": 32},
                sampling={"num_generations": 4, "max_completion_length": 200},
                engine={"max_model_len": 512, "max_num_seqs": 32, "enforce_eager": True},
                trainer={"max_steps": 2, "save_steps": 100, "learning_rate": 1e-3},
            )
        )
        ends = {
            "eos_token_id": [1, *range(60, 120)],
            "pad_token_id": 0,
        }  # of the model's 400 or so tokens: turns are short
        (short_dir / "model" / "generation_config.json").write_text(json.dumps(ends))
        agents_file = short_dir / "agent.jsonl"
        agents_file.write_text("".join(json.dumps(row_of(number)) + "\n" for number in range(20)))
        arguments = ["rows", "--config", config, "--from", str(agents_file), "--to", str(short_dir / "data.jsonl")]
        assert slipstream(["environment", *arguments]) == 0
        producer = Daemon("producer.app.cli", short_dir / "producer.log", "--config", config)
        daemons.append(producer)
        producer.wait_for("engine ready")
        trainer = Daemon("consumer.app.cli", short_dir / "trainer.log", "--config", config)
        daemons.append(trainer)
        end_well(trainer, producer, 240)
    steps = read_steps(short_dir)
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[-1]["counts"]["trained"] == 8
    assert all(1 < line["rewards/turns/mean"] <= 2 for line in steps), "episodes have several turns"
    assert all(line["rewards/environment/std"] > 0 for line in steps)
