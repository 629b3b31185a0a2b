"""Steps of completions: where they end, what a model and a service give them, and what a completion is worth by them."""

import asyncio
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from producer.groups import LeaseFailure
from producer.rewards.http_reward import HttpReward
from producer.rewards.messages import Job, Scores
from producer.rewards.pool import RewardPool, Scored
from producer.rewards.spans import Spans
from producer.rewards.steps import as_spans, reduced, split
from protocol.config.reward_options import RewardModel, RewardService, Steps
from protocol.errors import ConfigError
from slipstream_extras.reward_models.models import reward_model
from tests.integration.models import byte_bpe_tokenizer
from tests.unit.producer.loop import asynchronous
from tests.unit.producer.rewards.test_rewards import Seen, section


@pytest.mark.parametrize(
    ("text", "pattern", "steps"),
    [
        ("One.\n\nTwo.\n  \nThree.", r"\n\s*\n", ["One.\n\n", "Two.\n  \n", "Three."]),
        ("\n\n One.\n\n\n\n  Two.\n\n", r"\n\s*\n", ["\n\n One.\n\n\n\n", "  Two.\n\n"]),
        ("no step ends here", r"\n\s*\n", ["no step ends here"]),
        (" \n\n ", r"\n\s*\n", [" \n\n "]),
        ("", r"\n\s*\n", []),
        ("a.b. c.", r"(?<=\.)", ["a.", "b.", " c."]),
        ("Step 1: x Step 2: y", r"(?=Step \d)", ["Step 1: x ", "Step 2: y"]),
        ("a;b;c;d;e", ";", ["a;", "b;", "c;d;e"]),
    ],
)
def test_steps_are_the_whole_text(text: str, pattern: str, steps: list[str]) -> None:
    for completion in (text, [{"role": "assistant", "content": text}]):
        [ends] = split([completion], Steps(pattern=pattern, max_steps=3))
        assert isinstance(ends, list)
        assert [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)] == steps


@pytest.mark.long
def test_a_pattern_without_end_costs_its_completion_alone_and_no_other_thread() -> None:
    async def body() -> tuple[list[Any], float]:
        slow = Steps(pattern="(a|aa)+c|;", time_s=0.2)
        found = asyncio.ensure_future(asyncio.to_thread(split, ["x;y", "a" * 10_000, "x;"], slow))
        ticks = 0
        while not found.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return await found, ticks

    started = time.thread_time()
    (first, second, third), ticks = asyncio.run(body())
    assert (first, third) == ([2, 3], [2])
    assert isinstance(second, TimeoutError)
    assert ticks > 3
    assert time.thread_time() - started < 0.2


@pytest.mark.long
def test_all_matches_of_a_text_share_its_time() -> None:
    [found] = split([("a" * 20 + ";") * 2000], Steps(pattern="(a|aa)+c|;", time_s=0.2, max_steps=4096))
    assert isinstance(found, TimeoutError)


def test_a_long_text_of_blank_lines_is_split_in_linear_time() -> None:
    started = time.thread_time()
    assert split(["\n" * 20_000 + "x"], Steps(pattern="\n")) == [[20_001]]
    assert time.thread_time() - started < 0.5


def test_several_messages_have_no_steps() -> None:
    [found] = split([[{"role": "assistant", "content": "a"}] * 2], Steps())
    assert isinstance(found, ValueError)


@pytest.mark.parametrize(
    ("reduce", "worth"), [("sum", 1.0), ("mean", 0.25), ("min", -1.0), ("last", 0.5), ("product", -0.5)]
)
def test_what_a_completion_is_worth_by_hand(reduce: Any, worth: float) -> None:
    given = [0.5, -1.0, 1.0, 0.5]
    scores = Scores([math.fsum(given), 7.0, 0.0], spans={0: Spans("characters", [1, 2, 3, 4], given)})
    found = reduced(scores, Steps(reduce=reduce))
    assert found.rewards == [-0.25 if reduce == "product" else worth, 7.0, 0.0]
    assert found.spans == scores.spans


def test_a_product_that_no_float_holds_costs_its_completion_alone() -> None:
    spans = {0: Spans("tokens", [1, 2], [1e30, 1e30]), 1: Spans("tokens", [1, 2], [3.0, 2.0])}
    found = reduced(Scores([2e30, 5.0], spans=spans), Steps(reduce="product"))
    assert found.rewards == pytest.approx([math.nan, 6.0], nan_ok=True)
    assert found.failed[0][0] == "invalid"


# A model.


SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXTS = ["One, 你好.\n\nTwo 🙂.\n\nThree", "Only one.", "", "a\n\nb\n\n"]
ENDS = [[10, 18, 23], [9], [], [3, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with the labels bad, fair and good, whose logits differ widely."""
    return built(
        tmp_path_factory.mktemp("steps"), Qwen2ForTokenClassification, id2label={0: "bad", 1: "fair", 2: "good"}
    )


def built(path: Path, kind: Any, **values: Any) -> Path:
    tokenizer = byte_bpe_tokenizer()
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    kind(Qwen2Config(**SHAPE, **ids, num_key_value_heads=1, initializer_range=0.5, **values)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected(folder: Path, begin: str, text: str, ends: list[int], of: Callable[[np.ndarray], float]) -> list[float]:
    """By the model of the beginning of the text up to the token in which the step ends, alone and in float64."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = byte_bpe_tokenizer()
    rewards = []
    for end in ends:
        coded = tokenizer(begin + text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(coded["input_ids"], coded["offset_mapping"], strict=True)
        ids = [token for token, (start, _) in pairs if start < len(begin) + end]
        with torch.no_grad():
            rewards.append(of(model(torch.tensor([ids])).logits[0, -1].numpy()))
    return rewards


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "of"),
    [
        ({}, lambda logits: softmax(logits)[2]),
        ({"label": "bad", "batch_size": 3}, lambda logits: softmax(logits)[0]),
        ({"label": 1, "value": "logit"}, lambda logits: logits[1]),
        ({"label": -3, "value": "logit", "batch_size": 1}, lambda logits: logits[0]),
    ],
)
def test_a_model_is_read_at_the_last_token_of_each_step(folder: Path, options: Any, of: Any) -> None:
    score = reward_model(str(folder), RewardModel(steps={}, **options))
    chat = [{"role": "user", "content": "Count."}]
    for prompt, begin, completions in (
        ("Count: ", "Count: ", TEXTS),
        (chat, "<|user|>Count.<|end|><|assistant|>", [[{"role": "assistant", "content": text}] for text in TEXTS]),
    ):
        found = score([prompt] * 4, completions, completion_ids=[[1]] * 4)
        assert found[2] == 0.0
        for row in (0, 1, 3):
            ends, rewards = zip(*found[row]["characters"], strict=True)
            assert list(ends) == ENDS[row]
            assert rewards == pytest.approx(expected(folder, begin, TEXTS[row], ENDS[row], of), abs=1e-5)


@pytest.mark.long
def test_a_head_that_is_not_in_the_files_is_named_and_not_drawn(tmp_path: Path) -> None:
    path = built(tmp_path / "headless", Qwen2ForSequenceClassification, num_labels=1)
    tensors = load_file(path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"cannot be loaded: it lacks score\.weight"):
        reward_model(str(path), RewardModel())


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"{}"])
def test_broken_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = built(tmp_path / "broken", Qwen2ForSequenceClassification, num_labels=1)
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"^rewards.functions: model .* cannot be loaded: {path}/model\.safetensors is "
    ):
        reward_model(str(path), RewardModel())


@pytest.mark.long
def test_a_single_label_has_the_probability_of_its_sigmoid(tmp_path: Path) -> None:
    path = built(tmp_path / "one", Qwen2ForTokenClassification, num_labels=1)
    [found] = reward_model(str(path), RewardModel(steps=";"))(["p"], ["a;b"])
    sigmoid = expected(path, "p", "a;b", [2, 3], lambda logits: 1 / (1 + math.exp(-logits[0])))
    assert [reward for _, reward in found["characters"]] == pytest.approx(sigmoid, abs=1e-5)


@pytest.mark.long
def test_a_step_that_was_cut_off_and_a_broken_weight_cost_their_completions_alone(folder: Path) -> None:
    score = reward_model(str(folder), RewardModel(steps=";", max_length=8))
    long, short = score(["p" * 9] * 2, ["a;" + "b" * 50, "a;b"])
    assert isinstance(long, ValueError)
    assert len(short["characters"]) == 2
    with torch.no_grad():
        model = next(
            cell.cell_contents for cell in score.__closure__ if isinstance(cell.cell_contents, torch.nn.Module)
        )
        model.score.bias[2] = math.nan
    assert [type(each) for each in score(["p"] * 2, ["a;b", ""])] == [ValueError, float]


@pytest.mark.long
def test_what_scores_no_steps_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    other = built(tmp_path / "other", Qwen2ForSequenceClassification, num_labels=1)
    with pytest.raises(ConfigError, match=r"Qwen2ForSequenceClassification.*ForTokenClassification"):
        reward_model(str(other), RewardModel(steps={}))
    for label in ("god", 3, -4):
        with pytest.raises(ConfigError, match=f"no label {label!r}.*options.label"):
            reward_model(str(folder), RewardModel(steps={}, label=label))


# A service.


def of_service(answers: list[Any], rewards: Callable[[str], Any], seen: Seen | None = None) -> tuple[Any, list[Any]]:
    """Return the scores of two completions by a service that gives these answers. `rewards` makes the section of its url."""
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        said = answers.pop(0)
        return web.Response(text=said if isinstance(said, str) else json.dumps(said))

    async def body() -> Scored:
        app = web.Application()
        app.router.add_post("/steps", answer)
        async with TestServer(app) as server:
            pool = RewardPool(rewards(str(server.make_url("/steps"))), seen or Seen())
            pool.read_with(_Pieces(), {})
            try:
                return await pool.score("p", ["a.b; c", ""], [[1, 2, 3], []], {"answer": "x"})
            finally:
                await pool.close()

    return asyncio.run(body()), bodies


class _Pieces:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join({1: "a", 2: ".b;", 3: " c"}[token] for token in ids)


def service(reduce: str = "sum", **entry: Any) -> Callable[[str], Any]:
    options = {"steps": {"pattern": "[.;]", "reduce": reduce}}
    return lambda url: section({"url": url, "options": options, "weight": 2.0, **entry})


def test_a_service_gets_the_steps_and_its_rewards_lie_on_the_tokens_that_end_them() -> None:
    found, [body] = of_service([{"rewards": [[0.5, 0.25, 2], []]}], service("min"))
    assert body["steps"] == [["a.", "b;", " c"], []]
    assert body["completions"] == ["a.b; c", ""]
    np.testing.assert_array_equal(found.rewards, [[0.25], [0.0]])
    assert [list(each) for each in found.spans] == [[(2, 1.0), (2, 0.5), (3, 4.0)], []]  # "a." ends within a token


def test_a_service_may_leave_a_completion_out() -> None:
    found, _ = of_service([{"rewards": [None, []]}], service())
    np.testing.assert_array_equal(found.rewards, [[np.nan], [0.0]])
    assert not found.failures.entries()


@pytest.mark.parametrize(
    "answer",
    [
        {"rewards": [[1, 2], []]},
        {"rewards": [[1, 2, 3]]},
        {"rewards": [[1, 2, 3], [1]]},
        {"rewards": [[1, None, 3], []]},
        {"rewards": [1, 2]},
        {"rewards": [[1, 2, 1e39], []]},
        '{"rewards": [[1, 2, NaN], []]}',
        '{"rewards": [[1, 2, 1e999], []]}',
    ],
)
def test_an_answer_of_another_form_is_tried_again(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr("producer.rewards.pool._FIRST_PAUSE_S", 0.001)
    seen = Seen()
    found, bodies = of_service([answer, {"rewards": [[1, 2, 3], []]}], service(retries=1), seen)
    np.testing.assert_array_equal(found.rewards, [[6.0], [0.0]])
    assert (len(bodies), seen.failures) == (2, [])
    with pytest.raises(LeaseFailure):
        of_service([answer], service(retries=0), seen)
    assert seen.failures == [("steps", "invalid", 2)]


@asynchronous
async def test_a_slow_pattern_ends_with_the_limit_of_the_call_and_its_group_is_scored_without_it() -> None:
    slow = {"pattern": "(a|aa)+c", "time_s": 0.05}
    service = HttpReward("steps", "http://127.0.0.1:9/steps", RewardService(steps=slow))
    scores = await service.ask(Job("p", ["a" * 10_000] * 2, [[1]] * 2, {}), 0.01)
    await service.close()
    assert (scores.rewards, scores.reason) == (None, "timeout")
    [ends] = split(["a" * 10_000], Steps(**slow))
    returned = as_spans([[1.0], []], [[3], ends])
    assert returned[0] == {"characters": [(3, 1.0)]}
    assert isinstance(returned[1], TimeoutError)


# The section.


def test_a_pattern_is_short_for_its_section() -> None:
    entry = section({"model": "m", "options": {"steps": ";"}}).functions[0]
    assert entry.steps == Steps(pattern=";")
    assert section({"url": "http://h/p", "options": {"steps": {}}}).functions[0].steps == Steps()
    assert section({"model": "m"}, {"function": "a:b"}).functions[1].steps is None


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"options": {"steps": "("}}, "steps.pattern"),
        ({"options": {"steps": {"pattern": "a", "reduce": "max"}}}, "steps.reduce"),
        ({"options": {"steps": {"max_steps": 0}}}, "steps.max_steps"),
        ({"options": {"steps": {"max_steps": 4097}}}, "steps.max_steps"),
        ({"options": {"label": 1}}, "label is for steps"),
        ({"options": {"steps": {}, "label": True}}, "label"),
        ({"options": {"steps": {}}, "strip_thinking": True}, "strip_thinking: false"),
    ],
)
def test_what_is_no_section_of_steps(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        section({"model": "m", **entry})
