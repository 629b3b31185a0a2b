"""A run whose completions come from outside agents: real vLLM, real trainer, and a producer that is killed in the middle."""

import contextlib
import json
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from tests.integration.pair import Daemon
from tests.integration.test_pair import read_steps, write_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_STEPS = 8
LENGTH_REWARD = "def length(completions, **_):\n    return [float(len(text)) for text in completions]\n"


class Agent(threading.Thread):
    """Takes tasks, generates through the `openai` package, posts rewards; whatever fails, it goes on with the next task."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self._run_dir = run_dir
        self.over = threading.Event()
        self.posted: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self._work(self._base_url())
            except (OSError, IndexError, json.JSONDecodeError, httpx.HTTPError, openai.APIError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)

    def _base_url(self) -> str:
        newest = max((self._run_dir / "serve").glob("*.json"), key=lambda file: file.stat().st_mtime, default=None)
        if newest is None:
            raise FileNotFoundError("no producer yet")
        return f"http://{json.loads(newest.read_text())[0]['targets'][0]}/v1"

    def _work(self, base_url: str) -> None:
        with (
            httpx.Client(base_url=base_url, timeout=30) as http,
            openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client,
        ):
            while not self.over.is_set():
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


def journal(run_dir: Path) -> dict[str, int | None]:
    """The step that trained it, by group."""
    with contextlib.closing(sqlite3.connect(f"file:{run_dir}/journal.sqlite?mode=ro", uri=True)) as connection:
        return dict(connection.execute("SELECT group_id, step FROM groups").fetchall())


def test_a_run_learns_from_agents_and_a_killed_producer_costs_nothing_that_was_accepted(
    short_dir: Path, daemons: list[Daemon]
):
    functions = [{"posted": "digits"}, {"function": f"{short_dir}/rewards.py:length", "weight": 0.0}]
    config = str(
        write_run(
            short_dir,
            "qwen2",
            [{"prompt": f"{i}+1="} for i in range(40)],
            LENGTH_REWARD,
            rewards={"functions": functions},
            serve={"enabled": True},
            trainer={"max_steps": NUM_STEPS, "save_steps": 100, "learning_rate": 2e-3},
        )
    )
    run_dir = short_dir / "run"
    agents = [Agent(run_dir) for _ in range(3)]
    producer = Daemon("producer.cli", short_dir / "producer-1.log", "--config", config)
    daemons.append(producer)
    trainer = Daemon("consumer.cli", short_dir / "trainer.log", "--config", config)
    daemons.append(trainer)
    for agent in agents:
        agent.start()
    try:
        trainer.wait_for(r"step 3/")
        producer.kill()
        accepted = journal(run_dir)
        second = Daemon("producer.cli", short_dir / "producer-2.log", "--config", config)
        daemons.append(second)
        assert trainer.end(200) == 0, trainer.output[-3000:]
        assert second.end(60) == 0, second.output[-3000:]
    finally:
        for agent in agents:
            agent.over.set()
        for agent in agents:
            agent.join(40)
    assert all(agent.posted for agent in agents)
    assert any(agent.failures for agent in agents), "they noticed the kill, and went on"
    steps = read_steps(short_dir)
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    assert steps[-1]["counts"]["trained"] == NUM_STEPS * 4
    after = journal(run_dir)
    assert accepted.keys() <= after.keys()
    trained = Counter(step for step in after.values() if step is not None)
    assert sorted(trained.values()) == [4] * NUM_STEPS, "each row says the one step that trained it"
    digits = [line["rewards/digits/mean"] for line in steps]
    assert sum(digits[-3:]) > sum(digits[:3]), digits
    assert all(line["rewards/length/mean"] > 0 for line in steps)
