"""Groups of environments of Atropos: in a run with real vLLM, real trainer and a producer that is killed in the middle; and
those of an environment of the real `atroposlib`."""

import asyncio
import contextlib
import gzip
import itertools
import json
import re
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from producer.groups import Rollouts
from protocol.wire.codec import decode
from protocol.wire.messages import Group
from tests.integration.models import char_tokenizer
from tests.integration.outsiders import NUM_STEPS, check_learned, run_through_the_death_of_a_producer
from tests.integration.pair import Daemon
from tests.integration.test_pair import write_run
from tests.tools import python_with
from tests.unit.slipstream_extras.endpoint.atropos_scene import scene

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GROUP_SIZE = 4


def write_atropos_run(folder: Path, max_steps: int) -> str:
    trainer = {"max_steps": max_steps, "save_steps": 100, "learning_rate": 2e-3}
    path = write_run(folder, "qwen2", [], "def unused(): ...", trainer=trainer)
    config = yaml.safe_load(path.read_text())
    del config["dataset"], config["rewards"]
    path.write_text(yaml.safe_dump(config | {"environment": {"agent": "atropos"}, "serve": {"enabled": True}}))
    return str(path)


class Environment:
    """Does what `BaseEnv` does, in its order and with its requests, and registers again when its producer is another one."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._item = 0
        self.num_asked = 0  # sequences
        self.sampled: dict[tuple[int, ...], list[list[float]]] = {}
        """Log-probs of sequences that were posted, by their tokens."""

    def work(self, url: str, over: threading.Event) -> None:
        with httpx.Client(base_url=f"{url}/atropos", timeout=30) as http:
            registration = {
                "max_token_length": 32,
                "desired_name": "digits",
                "weight": 1.0,
                "min_batch_allocation": None,
                "group_size": GROUP_SIZE,
            }
            registered = http.post("/register-env", json=registration).raise_for_status().json()
            if registered["status"] != "success":
                time.sleep(0.5)
                return
            batch_size = http.get("/info").raise_for_status().json()["batch_size"]
            while not over.is_set():
                body = {"env_id": registered["env_id"]}
                status = http.request("GET", "/status-env", json=body).raise_for_status().json()
                if status["queue_size"] * GROUP_SIZE >= 3 * batch_size:
                    time.sleep(0.05)
                else:
                    self._send(http, self._group(http))

    def _group(self, http: httpx.Client) -> dict:
        self._item = (self._item + 1) % 40
        prompt = self._tokenizer.encode(f"{self._item}+1=")
        request = {
            "prompt": {"prompt_token_ids": prompt},
            "logprobs": 0,
            "n": GROUP_SIZE,
            "max_tokens": 16,
            "temperature": 1.0,
        }
        self.num_asked += GROUP_SIZE
        answer = http.post("/generate", json=request).raise_for_status().json()
        tokens = [prompt + [int(next(iter(entry[0]))) for entry in each] for each in answer["logprobs"]]
        logprobs = [[next(iter(entry[0].values())) for entry in each] for each in answer["logprobs"]]
        for sequence, values in zip(tokens, logprobs, strict=True):
            self.sampled.setdefault(tuple(sequence), []).append(values)
        texts = [self._tokenizer.decode(sequence[len(prompt) :]) for sequence in tokens]
        return {
            "tokens": tokens,
            "masks": [[-100] * len(prompt) + sequence[len(prompt) :] for sequence in tokens],
            "inference_logprobs": [[1.0] * len(prompt) + values for values in logprobs],
            "scores": [float(sum(map(str.isdigit, text))) for text in texts],
            "ref_logprobs": None,
            "overrides": None,
            "group_overrides": None,
        }

    def _send(self, http: httpx.Client, group: dict) -> None:
        packed = gzip.compress(json.dumps(group).encode())
        for _ in range(2):  # as if it had not seen the answer
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            http.post("/scored_data", content=packed, headers=headers).raise_for_status()


def groups_of(run_dir: Path) -> list[Group]:
    with contextlib.closing(sqlite3.connect(f"file:{run_dir}/journal.sqlite?mode=ro", uri=True)) as connection:
        frames = connection.execute("SELECT frame FROM bodies").fetchall()
    return [decode(bytes(frame), Group) for (frame,) in frames]


def sequences(group: Group) -> list[tuple[tuple[int, ...], list[float]]]:
    """Tokens, and the log-probs of those behind the prompt."""
    prompt, lengths = (np.frombuffer(data, "<i4") for data in (group.prompt_ids, group.completion_lengths))
    tokens, logprobs = np.frombuffer(group.completion_ids, "<i4"), np.frombuffer(group.logprobs, "<f4")
    parts = [slice(end - length, end) for end, length in zip(lengths.cumsum(), lengths, strict=True)]
    return [((*prompt.tolist(), *tokens[part].tolist()), logprobs[part].tolist()) for part in parts]


def check_run(steps: list[dict[str, Any]]) -> None:
    assert steps[-1]["counts"].get("rerolls_leased", 0) == 0
    check_learned(steps, "environment")


def test_a_run_learns_from_what_environments_post_through_the_death_of_a_producer(
    short_dir: Path, daemons: list[Daemon]
):
    config = write_atropos_run(short_dir, NUM_STEPS)
    environments = [Environment(short_dir / "model") for _ in range(2)]
    works = [environment.work for environment in environments]
    check_run(run_through_the_death_of_a_producer(short_dir, config, works, daemons))
    answered = Counter(
        (tokens, tuple(np.float32(value) for value in values))
        for environment in environments
        for tokens, of_one in environment.sampled.items()
        for values in of_one
    )
    kept = Counter(
        (tokens, tuple(np.float32(v) for v in values))
        for group in groups_of(short_dir / "run")
        for tokens, values in sequences(group)
    )
    assert kept, "nothing is in the journal"
    # An answer that its producer's death kept back was sampled, too, and stands in for equal tokens of another environment.
    num_lost = sum(environment.num_asked for environment in environments) - answered.total()
    said = "each sequence with the log-probs that it was sampled with, and as often as it was sampled"
    assert (kept - answered).total() <= num_lost, said
    assert num_lost <= kept.total() / 4, "nearly all answers came"


def test_an_environment_of_atroposlib_posts_groups(tmp_path: Path):
    python = python_with("atroposlib")
    script = Path(__file__).with_name("atropos_environment.py")
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    async def body() -> list[Rollouts]:
        async with scene(tmp_path) as it:
            it.vllm.tokens = itertools.cycle(tokenizer.convert_tokens_to_ids(["7", "a"]))
            url = f"http://127.0.0.1:{it.port}/atropos"
            options = {
                "env.rollout_server_url": url,
                "env.total_steps": -1,
                "env.tokenizer_name": tmp_path / "tokenizer",
                "env.group_size": 2,
                "openai.base_url": f"{url}/v1",
                "openai.tokenizer_name": tmp_path / "tokenizer",
            }
            arguments = [f"--{name}={value}" for name, value in options.items()]
            with (tmp_path / "environment.log").open("wb") as log:
                environment = await asyncio.create_subprocess_exec(
                    python, str(script), "serve", *arguments, stdout=log, stderr=log, cwd=tmp_path
                )
            try:
                return await asyncio.wait_for(asyncio.gather(*(it.atropos.fulfil(12) for _ in range(3))), 200)
            except TimeoutError as failure:
                failure.add_note((tmp_path / "environment.log").read_text()[-3000:])
                raise
            finally:
                environment.kill()
                await environment.wait()

    items = set()
    for group in asyncio.run(body()):  # as they came: a busy machine may have another one overtake the third
        said = [tokenizer.decode(episode.records[0].token_ids) for episode in group.episodes]
        item = said[0].removesuffix("77")
        assert said == [f"{item}77", f"{item}aa"]
        assert re.fullmatch(r"\d+\+1=", item)
        items.add(item)
        for episode in group.episodes:
            assert episode.records[0].is_sampled.tolist() == [False] * len(item) + [True] * 2
            assert episode.records[0].logprobs[len(item) :].tolist() == [-0.25, -0.5]
        assert group.own_rewards.tolist() == [[2.0], [0.0]], "a digit is a point"
    assert len(items) == 3
