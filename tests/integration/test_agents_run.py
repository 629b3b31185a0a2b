"""A run whose completions come from outside agents: real vLLM, real trainer, and a producer that is killed in the middle. Also an
agent that knows nothing but a base URL, with a scripted policy."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from slipstream_extras.endpoint.agents import Agents
from tests.integration.outsiders import NUM_STEPS, check_learned, run_through_the_death_of_a_producer
from tests.integration.pair import Daemon
from tests.integration.test_pair import write_run
from tests.scripted_policy import ScriptedPolicy, endpoint, lease_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LENGTH_REWARD = "def length(completions, **_):\n    return [float(len(text)) for text in completions]\n"


class Agent:
    """Takes tasks, generates through the `openai` package, posts rewards."""

    def __init__(self) -> None:
        self.posted: list[float] = []

    def work(self, url: str, over: threading.Event) -> None:
        with (
            httpx.Client(base_url=f"{url}/v1", timeout=30) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            while not over.is_set():
                answer = http.post("/rollouts", json={"wait_s": 1})
                if answer.status_code == 204:
                    continue
                task = answer.raise_for_status().json()
                for episode in task["episodes"]:
                    completion = client.completions.create(
                        model="policy", prompt=task["prompt"], extra_headers={"x-episode": episode}
                    )
                    reward = float(sum(map(str.isdigit, completion.choices[0].text)))
                    http.post(f"/rollouts/{episode}/reward", json={"digits": reward}).raise_for_status()
                    self.posted.append(reward)


def test_a_run_learns_from_agents_and_a_killed_producer_costs_nothing_that_was_accepted(
    short_dir: Path, daemons: list[Daemon]
):
    functions = [{"posted": "digits"}, {"function": f"{short_dir}/rewards.py:length", "weight": 0.0}]
    config = write_run(
        short_dir,
        "qwen2",
        [{"prompt": f"{i}+1="} for i in range(40)],
        LENGTH_REWARD,
        rewards={"functions": functions},
        serve={"enabled": True},
        trainer={"max_steps": NUM_STEPS, "save_steps": 100, "learning_rate": 2e-3},
    )
    agents = [Agent() for _ in range(3)]
    steps = run_through_the_death_of_a_producer(short_dir, str(config), [agent.work for agent in agents], daemons)
    assert all(agent.posted for agent in agents)
    check_learned(steps, "digits")
    assert all(line["rewards/length/mean"] > 0 for line in steps)


def test_an_agent_that_is_given_a_base_url_alone_plays_its_episodes(tmp_path: Path):
    async def play(url: str, messages: list[Any]) -> float:
        """Ask until the answer is right: an agent of another project, which can set no header and no field."""
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            (model,) = [model.id async for model in client.models.list() if "@" not in model.id]
            for _ in range(3):
                answer = await client.chat.completions.create(model=model, messages=messages)
                said = answer.choices[0].message.content or ""
                if said == "4":
                    break
                messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "no"}]
        return (len(messages) + 1) / 2

    async def work(base_url: str) -> None:
        async with httpx.AsyncClient(base_url=base_url) as http:
            task = (await http.post("/rollouts", json={"wait_s": 5})).raise_for_status().json()
            root = base_url.removesuffix("/v1")
            turns = [play(f"{root}/episodes/{name}/v1", task["prompt"]) for name in task["episodes"]]
            for name, reward in zip(task["episodes"], await asyncio.gather(*turns), strict=True):
                (await http.post(f"/rollouts/{name}/reward", json={"turns": reward})).raise_for_status()

    async def body() -> None:
        policy, agents = ScriptedPolicy(lambda said: "4" if len(said) == 3 else "5"), Agents(("turns",))
        async with endpoint(tmp_path, policy, agents) as base_url:
            row = {"prompt": [{"role": "user", "content": "double 2"}]}
            (episodes, rewards, _), _ = await asyncio.gather(agents.fulfil(lease_of(row, 0)), work(base_url))
        np.testing.assert_array_equal(rewards, [[2.0]] * 2)
        for episode in episodes:
            (record,) = episode.records
            assert "".join(map(chr, record.token_ids)) == "u:double 2\na:5\nu:no\na:4\n"
            sampled = zip(record.token_ids, record.is_sampled, strict=True)
            assert "".join(chr(token) for token, ours in sampled if ours) == "5\n4\n"

    asyncio.run(asyncio.wait_for(body(), 60))
