"""A run whose completions come from outside agents: real vLLM, real trainer, and a producer that is killed in the middle."""

import threading
from pathlib import Path

import httpx
import openai
import pytest

from tests.integration.outsiders import NUM_STEPS, check_learned, run_through_the_death_of_a_producer
from tests.integration.pair import Daemon
from tests.integration.test_pair import write_run

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
