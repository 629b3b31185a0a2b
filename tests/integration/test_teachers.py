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
from producer.rollouts.prompts import load_tokenizer
from protocol.errors import ConfigError
from protocol.wire.messages import Group
from slipstream_extras.engine_server.teachers import TeacherPool
from tests.integration.engines import run_config
from tests.integration.models import build_model, char_tokenizer, reference_distributions, reference_logprobs
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


def sections(server: VllmServer, mode: str = "advantage", **options: Any) -> dict[str, Any]:
    return {"teachers": [{"name": "expert", "url": server.url}], "distillation": {"mode": mode} | options}


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

    async def ask(times: int, top_k: int) -> list[dict[str, bytes]]:
        metrics = ProducerMetrics(CollectorRegistry(), teachers=["expert"])
        options = sections(server, "divergence", top_k=top_k)
        pool = TeacherPool(run_config(server.model, tmp_path / "run", **options), metrics)
        try:
            await pool.read_with(load_tokenizer(server.model, trust_remote_code=False))
            return [await pool.scores(lease(7), group) for _ in range(times)]
        finally:
            await pool.close()

    token_ids = np.frombuffer(group.completion_ids, "<i4")
    records = np.split(token_ids, np.frombuffer(group.completion_lengths, "<i4").cumsum()[:-1])
    whole = torch.cat([reference_distributions(server.model, None, PROMPT, one.tolist()) for one in records])
    own, likeliest = whole.gather(1, torch.tensor(token_ids)[:, None].long())[:, 0], whole.topk(3).values
    is_sampled = torch.tensor(np.frombuffer(group.sampled, "?"))
    assert is_sampled.logical_not().sum() == 5
    for found in asyncio.run(ask(2, 3)):  # twice, because a server keeps what it has computed
        logprobs, ids, top = (
            torch.tensor(np.frombuffer(found[f"teacher_{name}"], kind)).view(len(own), -1)
            for name, kind in (("logprobs", "<f4"), ("top_ids", "<i4"), ("top_logprobs", "<f4"))
        )
        torch.testing.assert_close(logprobs[:, 0], own.where(is_sampled, 0.0), atol=1e-4, rtol=0)
        assert ((ids == -1) == ~is_sampled[:, None]).all()
        torch.testing.assert_close(top[is_sampled], likeliest[is_sampled], atol=1e-4, rtol=0)
        theirs = whole[is_sampled].gather(1, ids[is_sampled].long())
        torch.testing.assert_close(top[is_sampled], theirs, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match=r"distillation\.top_k.*--max-logprobs 21"):
        asyncio.run(ask(1, 21))


def divergences(student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor, beta: float) -> list[float]:
    """Of probabilities (T, V), over the tokens of each row of `ids`, of which the first may come again, and all the rest."""
    result = []
    for s, t, own in zip(student.double(), teacher.double(), ids, strict=True):
        buckets = own.unique()
        s, t = (torch.cat([p[buckets], (1 - p[buckets].sum())[None]]) for p in (s, t))
        m = beta * t + (1 - beta) * s
        result.append((beta * t * (t / m).log() + (1 - beta) * s * (s / m).log()).sum().item())
    return result


@pytest.mark.parametrize("mode", ["advantage", "divergence"])
def test_a_pair_learns_from_it(server: VllmServer, short_dir: Path, daemons: list[Daemon], mode: str) -> None:
    server.wait_until_ready()
    options = {"top_k": 4, "beta": 0.25} if mode == "divergence" else {}
    run = sections(server, mode, **options) | {"trainer": {"max_steps": 2, "save_steps": 1}}
    run_pair(short_dir, str(write_run(short_dir, "qwen2", ROWS, REWARD, **run)), daemons)

    assert len(versions_trained_on(short_dir)) == 2 * 4 * 4
    gains, apart = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for group in map(json.loads, (short_dir / "trained.jsonl").read_text().splitlines()):
        step, tops = group["step"], group["teacher_top_ids"] or [None] * 4
        before = short_dir / "run" / "checkpoints" / f"checkpoint-{step - 1}" if step > 1 else None
        columns = (group["completion_ids"], group["logprobs"], group["teacher_logprobs"], tops)
        for ids, own, taught, top in zip(*columns, strict=True):
            whole = reference_distributions(server.model, None, group["prompt_ids"], ids)
            expected = whole.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(taught), expected, atol=1e-4, rtol=0)
            gains[step] += (np.array(taught) - np.array(own)).tolist()
            if top is not None:
                policy = reference_distributions(short_dir / "model", before, group["prompt_ids"], ids)
                buckets = torch.tensor([[one, *others] for one, others in zip(ids, top, strict=True)])
                apart[step] += divergences(policy.exp(), whole.exp(), buckets, 0.25)
    found = {line["step"]: line["distillation/logprob_gain"] for line in read_steps(short_dir)}
    assert found == {step: pytest.approx(np.mean(gains[step]), abs=1e-5) for step in (1, 2)}
    means = {line["step"]: line["distillation/divergence"] for line in read_steps(short_dir) if mode == "divergence"}
    assert means == {step: pytest.approx(np.mean(values), abs=1e-4) for step, values in apart.items()}


def test_the_policy_teaches_itself_with_the_solution_before_its_eyes(short_dir: Path, daemons: list[Daemon]) -> None:
    rows = [{"prompt": f"{i}+1=", "solution": f"{i + 1}"} for i in range(40)]
    own = {
        "teachers": [{"name": "self", "prompt": "{solution};{prompt}"}],
        "distillation": {"mode": "advantage", "alone": True},
    }
    config = write_run(short_dir, "qwen2", rows, REWARD, trainer={"max_steps": 1, "save_steps": 1}, **own)
    run_pair(short_dir, str(config), daemons)

    versions_trained_on(short_dir)
    model = short_dir / "model"
    tokenizer, places, gains = load_tokenizer(model, trust_remote_code=False), set(), list[float]()
    for group in map(json.loads, (short_dir / "trained.jsonl").read_text().splitlines()):
        row = rows[group["prompt_id"]]
        prompt = tokenizer(f"{row['solution']};{row['prompt']}")["input_ids"]
        assert group["policy_version"] == 0, "the base, because its adapter changes nothing yet"
        for ids, own_logprobs, taught in zip(
            group["completion_ids"], group["logprobs"], group["teacher_logprobs"], strict=True
        ):
            expected = reference_logprobs(model, None, prompt, ids, 1.0)
            torch.testing.assert_close(torch.tensor(taught), expected, atol=1e-4, rtol=0)
            gains += (np.array(taught) - np.array(own_logprobs)).tolist()
            places.add(tuple(ids))
    assert len(places) > 1
    assert np.std(gains) > 0.01, "what the teacher knows shows"
    (line,) = read_steps(short_dir)
    assert line["distillation/logprob_gain"] == pytest.approx(np.mean(gains), abs=1e-5)
    assert line["grad_norm"] > 0


def test_a_policy_of_another_vocabulary_is_not_started(
    server: VllmServer, short_dir: Path, daemons: list[Daemon]
) -> None:
    server.wait_until_ready()
    config = str(write_run(short_dir, "llama", ROWS, REWARD, **sections(server)))
    producer = Daemon("tests.integration.engineless_producer", short_dir / "producer.log", "--config", config)
    daemons.append(producer)
    assert producer.end() == 78, producer.last_words
    assert f"expert at {server.url}" in producer.output
