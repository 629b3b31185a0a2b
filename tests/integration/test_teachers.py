"""A real `vllm serve`, of other weights than the policy's, as a teacher: what it scores, and which policies it cannot teach."""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from producer.engine_contract import Completion
from producer.groups import Episode, Record, group_message
from producer.metrics import ProducerMetrics
from producer.plugins.engine_server.teachers import TeacherPool
from producer.rollouts.prompts import load_tokenizer
from protocol.wire.messages import Group
from tests.integration.engines import run_config
from tests.integration.models import build_model, char_tokenizer, reference_logprobs
from tests.integration.pair import Daemon, run_pair
from tests.integration.test_pair import REWARD, read_steps, versions_trained_on, write_run
from tests.integration.vllm_server import VllmServer
from tests.scripted_trainer import lease

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8, 9]
ROWS = [{"prompt": f"{i}+1="} for i in range(40)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Start a server that computes long prompts in several passes."""
    folder = tmp_path_factory.mktemp("teacher")
    with ExitStack() as stack:
        model = build_model("qwen2", folder / "model", seed=7)
        yield VllmServer(model, folder, stack, max_len=256, flags=("--max-num-batched-tokens", "64"))


def sections(server: VllmServer) -> dict[str, Any]:
    return {"teachers": [{"name": "expert", "url": server.url}], "distillation": {"mode": "advantage"}}


def group_of_unlike_lengths() -> Group:
    """Of 1 to 200 tokens, the third with tokens that the policy did not sample, and with a second record."""
    chance, known = random.Random(3), range(3, len(char_tokenizer()))

    def sampled(length: int) -> Completion:
        ids = chance.choices(known, k=length)
        return Completion(ids, [-0.5] * length, False, [0] * length)

    first, second = Record.of(PROMPT), Record.of([*PROMPT, 20, 21])
    first.sampled(sampled(3))
    first.show([22, 23, 24])
    for record in (first, second):
        record.sampled(sampled(6))
    episodes = [Episode.of(PROMPT, sampled(length)) for length in (1, 200)]
    return group_message("7.0", [*episodes, Episode(5, [first, second])], np.zeros((3, 1), "f4"), 200, 0.0, 0.0)


def test_its_log_probs_are_those_of_transformers(server: VllmServer, tmp_path: Path) -> None:
    server.wait_until_ready()
    group = group_of_unlike_lengths()

    async def ask() -> list[torch.Tensor]:
        """Twice, because a server keeps what it has computed."""
        metrics = ProducerMetrics(CollectorRegistry(), teachers=["expert"])
        pool = TeacherPool(run_config(server.model, tmp_path / "run", **sections(server)), metrics)
        try:
            await pool.read_with(load_tokenizer(server.model, trust_remote_code=False))
            answers = [await pool.logprobs(lease(7), group) for _ in range(2)]
        finally:
            await pool.close()
        return [torch.tensor(np.frombuffer(answer, "<f4")) for answer in answers]

    token_ids = np.frombuffer(group.completion_ids, "<i4")
    records = np.split(token_ids, np.frombuffer(group.completion_lengths, "<i4").cumsum()[:-1])
    everything = torch.cat([reference_logprobs(server.model, None, PROMPT, one.tolist(), 1.0) for one in records])
    is_sampled = torch.tensor(np.frombuffer(group.sampled, "?"))
    assert is_sampled.logical_not().sum() == 5
    for found in asyncio.run(ask()):
        torch.testing.assert_close(found, everything.where(is_sampled, 0.0), atol=1e-4, rtol=0)


def test_a_pair_learns_from_it(server: VllmServer, short_dir: Path, daemons: list[Daemon]) -> None:
    server.wait_until_ready()
    trainer = {"max_steps": 2, "save_steps": 1}
    run_pair(short_dir, str(write_run(short_dir, "qwen2", ROWS, REWARD, trainer=trainer, **sections(server))), daemons)

    assert len(versions_trained_on(short_dir)) == 2 * 4 * 4
    gains = defaultdict[int, list[float]](list)
    for group in map(json.loads, (short_dir / "trained.jsonl").read_text().splitlines()):
        for ids, own, taught in zip(group["completion_ids"], group["logprobs"], group["teacher_logprobs"], strict=True):
            expected = reference_logprobs(server.model, None, group["prompt_ids"], ids, 1.0)
            torch.testing.assert_close(torch.tensor(taught), expected, atol=1e-4, rtol=0)
            gains[group["step"]] += (np.array(taught) - np.array(own)).tolist()
    found = {line["step"]: line["distillation/logprob_gain"] for line in read_steps(short_dir)}
    assert found == {step: pytest.approx(np.mean(gains[step]), abs=1e-5) for step in (1, 2)}


def test_a_policy_of_another_vocabulary_is_not_started(
    server: VllmServer, short_dir: Path, daemons: list[Daemon]
) -> None:
    server.wait_until_ready()
    config = str(write_run(short_dir, "llama", ROWS, REWARD, **sections(server)))
    producer = Daemon("tests.integration.engineless_producer", short_dir / "producer.log", "--config", config)
    daemons.append(producer)
    assert producer.end() == 78, producer.last_words
    assert f"expert at {server.url}" in producer.output
