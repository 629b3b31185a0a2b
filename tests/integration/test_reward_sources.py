"""Rewards that are an HTTP service or a model, with the real server, process and checkpoint."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

from producer.groups import LeaseFailure
from producer.rewards.pool import RewardPool
from protocol.config.rewards import RewardsSection
from protocol.errors import ConfigError
from tests.integration.models import build_model, byte_bpe_tokenizer
from tests.unit.producer.rewards.test_rewards import Seen, section, with_pool

pytestmark = pytest.mark.integration


class Judge(ThreadingHTTPServer):
    """A service that answers in turn what `answers` has: a status with a body, or seconds to wait first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Any] = []
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock, self.is_over = threading.Lock(), threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((dict(self.headers), body))
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            answer = self.server.answers.pop(0) if self.server.answers else (200, None)
        status, said = answer
        if isinstance(said, float):
            self.server.is_over.wait(said)
            said = None
        content = (
            said if isinstance(said, bytes) else json.dumps({"rewards": [len(c) for c in body["completions"]]}).encode()
        )
        with self.server.lock:
            self.server.at_once -= 1
        try:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def judge() -> Iterator[Judge]:
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        thread.join(10)
        server.server_close()


def service(server: Judge, **entry: Any) -> RewardsSection:
    return section({"url": f"http://127.0.0.1:{server.server_port}/judge", "timeout_s": 30, **entry})


def score(rewards: RewardsSection, seen: Seen | None = None) -> np.ndarray:
    async def use(pool: RewardPool) -> np.ndarray:
        return (await pool.score("p", ["a", "bc"], [[1], [2, 3]], {"answer": "x"}))[0]

    return with_pool(rewards, use, seen)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.rewards.pool._FIRST_PAUSE_S", 0.01)


def test_a_service_is_sent_the_group_and_its_rewards_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "Bearer secret")
    with judge() as server:
        server.answers = [(200, b'{"rewards": [0.5, null]}')]
        rewards = score(service(server, options={"headers_env": {"Authorization": "JUDGE_TOKEN"}}))
        np.testing.assert_array_equal(rewards, [[0.5], [np.nan]])
        ((headers, body),) = server.requests
        assert headers["Authorization"] == "Bearer secret"
        assert body == {
            "prompt": "p",
            "completions": ["a", "bc"],
            "completion_ids": [[1], [2, 3]],
            "columns": {"answer": "x"},
        }


def test_what_a_service_does_wrong_is_tried_again_and_then_named() -> None:
    with judge() as server:
        server.answers = [(503, b"busy"), (200, 9.0), (200, b"<html>")]
        np.testing.assert_array_equal(score(service(server, timeout_s=3)), [[1.0], [2.0]])
        assert len(server.requests) == 4
        for answer, said, reason in (
            ((404, b"not here"), "answered with status 404: not here", "unavailable"),
            ((302, b""), "answered with status 302", "unavailable"),
        ):
            server.requests, server.answers, seen = [], [answer] * 9, Seen()
            with pytest.raises(LeaseFailure, match=said):
                score(service(server), seen)
            assert len(server.requests) == 1  # another try would say the same
            assert seen.failures == [("judge", reason, 2)]
        for answer, said, reason, timeout_s in (
            ((200, b'{"rewards": [1]}'), "returned 1 rewards for 2 completions", "invalid", 30),
            ((200, b'{"rewards": ["1", 2]}'), "sent another answer", "invalid", 30),
            ((200, b" " * 5000), "more than options.max_answer_bytes=2048", "invalid", 30),
            ((200, 9.0), "did not answer within 0.2 seconds", "timeout", 0.2),
        ):
            server.answers, seen = [answer] * 9, Seen()
            with pytest.raises(LeaseFailure, match=said):
                score(service(server, retries=1, timeout_s=timeout_s, options={"max_answer_bytes": 2048}), seen)
            assert (len(seen.calls), seen.failures) == (2, [("judge", reason, 2)])
    with pytest.raises(LeaseFailure, match="could not be reached"):
        score(service(server, retries=0))
    with pytest.raises(ConfigError, match="needs the environment variable NOT_SET"):
        score(service(server, options={"headers_env": {"X": "NOT_SET"}}))


def test_a_service_is_asked_so_often_at_once_and_no_more() -> None:
    with judge() as server:
        server.answers = [(200, 0.3)] * 6

        async def use(pool: RewardPool) -> None:
            await asyncio.gather(*(pool.score("p", ["a"], [[1]], {}) for _ in range(6)))

        with_pool(service(server, concurrency=2), use)
        assert server.most_at_once == 2


def build_reward_model(folder: Path, num_labels: int = 1) -> Path:
    tokenizer = byte_bpe_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForSequenceClassification(
        Qwen2Config(
            **shape,
            num_key_value_heads=1,
            vocab_size=len(tokenizer),
            num_labels=num_labels,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_scores_prompt_and_completion_as_transformers_does(tmp_path: Path) -> None:
    folder = build_reward_model(tmp_path / "judge")
    prompt = [{"role": "user", "content": "What is the sum?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("five", "The sum is two and three, I think.")]
    seen = Seen()

    async def use(pool: RewardPool) -> tuple[np.ndarray, np.ndarray]:
        assert pool.num_workers == 1
        chat, *_ = await pool.score(prompt, answers, [[1], [2]], {})
        plain, *_ = await pool.score("2+2=", ["4", "five"], [[1], [2]], {})
        return chat, plain

    entry = {"model": str(folder), "options": {"max_length": 64}}
    chat, plain = with_pool(section(entry, timeout_s=60), use, seen)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = byte_bpe_tokenizer()
    texts = [tokenizer.apply_chat_template([*prompt, *answer], tokenize=False) for answer in answers]
    for got, text in zip([*chat[:, 0], *plain[:, 0]], [*texts, "2+2=4", "2+2=five"], strict=True):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert got == pytest.approx(model(ids).logits[0, 0].item(), abs=1e-5)
    assert seen.calls == ["judge"] * 2


def test_what_is_no_reward_model_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = build_reward_model(tmp_path / "labels", num_labels=3)
    with pytest.raises(ConfigError, match="it has 3 labels; a reward model has 1"):
        score(section({"model": str(folder)}))


def test_features_are_matched_in_one_process_for_all_entries(tmp_path: Path) -> None:
    entries = [{"function": "feature_matching"}] + [
        {"function": "feature_matching", "name": name, "weight": 0.0, "options": {"score": name}}
        for name in ("alignment", "diversity", "distance")
    ]
    rewards = section(*entries, timeout_s=60).computed(str(build_model("llama", tmp_path / "base")), None)

    async def use(pool: RewardPool) -> np.ndarray:
        assert pool.num_workers == 1
        found = [await pool.score("2+2=", ["four", "4", "five", "4"], [[1]] * 4, {"answer": "four"}) for _ in range(2)]
        np.testing.assert_array_equal(found[0].rewards, found[1].rewards)
        return found[0].rewards

    reward, alignment, diversity, distance = with_pool(rewards, use).T
    np.testing.assert_allclose(reward, alignment - diversity, atol=1e-6)
    assert alignment[0] == max(alignment)
    np.testing.assert_allclose(diversity, [0, 1 / 6, 0, 1 / 6], atol=1e-3)
    assert len(set(distance)) == 1
