"""OpenAI clients at a real run: real vLLM, real trainer, two processes."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.integration.pair import Daemon
from tests.integration.test_pair import CHAT_REWARD, read_steps, write_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROWS = [{"prompt": [{"role": "user", "content": f"What is {i} and three?"}]} for i in range(40)]
MESSAGES = [{"role": "user", "content": "What is two and three?"}]


def client_of(run_dir: Path, timeout_s: float = 120.0, has_ended: Callable[[], bool] = lambda: False) -> openai.OpenAI:
    """A client of the producer whose address is written there, by then or before the run has ended."""
    deadline = time.monotonic() + timeout_s
    while not (files := list((run_dir / "serve").glob("rl-producer-*.json"))):
        assert not has_ended(), "it ended before it served"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    address = json.loads(files[0].read_text())[0]["targets"][0]
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)


def test_clients_are_served_the_newest_policy_and_named_ones_while_it_trains(short_dir: Path, daemons: list[Daemon]):
    sections = {
        "serve": {"enabled": True, "version_ttl_s": 30},
        "trainer": {"max_steps": 1_000_000, "save_steps": 100_000},
    }
    config = str(write_run(short_dir, "llama", ROWS, CHAT_REWARD, **sections))
    producer = Daemon("producer.cli", short_dir / "producer.log", "--config", config)
    daemons.append(producer)
    trainer = Daemon("consumer.cli", short_dir / "trainer.log", "--config", config)
    daemons.append(trainer)
    trainer.wait_for(r"step 2/", beside=producer)

    def greedy(model: str) -> tuple[str, str]:
        answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0.0)
        return answer.model, answer.choices[0].message.content

    with client_of(short_dir / "run") as client:
        pinned = greedy("policy")
        seen, texts = {pinned[0]}, {pinned[1]}
        deadline = time.monotonic() + 120
        while len(seen) < 6 or len(texts) < 2:  # the weights change, not their name alone
            assert time.monotonic() < deadline, (seen, texts, trainer.output[-2000:])
            assert greedy(pinned[0]) == pinned
            with client.chat.completions.create(
                model="policy", messages=MESSAGES, max_tokens=12, temperature=0.0, stream=True
            ) as stream:
                pieces = list(stream)
            seen.add(pieces[0].model)
            texts.add("".join(piece.choices[0].delta.content or "" for piece in pieces))
        assert sorted(seen, key=lambda name: int(name.rpartition("v")[2]))[0] == pinned[0]
    steps = len(read_steps(short_dir))
    trainer.wait_for(rf"step {steps + 3}/", beside=producer)
    producer.close()
    assert producer.process.returncode == 0
