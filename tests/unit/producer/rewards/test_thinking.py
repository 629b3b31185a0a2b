"""Reasoning told from answers, counted in tokens; with a tokenizer of one token per character but for `<think>`."""

import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from producer.rewards.messages import Job, Scores
from producer.rewards.pool import RewardPool
from producer.rewards.thinking import Reasoning, Thinking, segments, view, with_hidden_rows
from protocol.config.rewards import ThinkingSection
from tests.unit.producer.rewards.test_rewards import section, with_pool

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}A:{{ tail }}{% endif %}"


def tokenizer(special: bool = False) -> PreTrainedTokenizerFast:
    letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz<>/ 0123456789")}
    inner = Tokenizer(models.WordLevel(letters | {"?": len(letters)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    (inner.add_special_tokens if special else inner.add_tokens)(["<think>", "</think>"])
    inner.add_special_tokens(["<eos>"])
    extra: dict[str, Any] = {"extra_special_tokens": ["<think>", "</think>"]} if special else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", unk_token="?", chat_template=TEMPLATE, **extra
    )


@pytest.mark.parametrize(
    ("text", "opened", "found", "closed"),
    [
        ("plain", False, [], True),
        ("plain", True, [(0, 5)], False),
        ("<think>a</think>b", False, [(0, 16)], True),
        ("a</think>b", True, [(0, 9)], True),
        ("a</think>b", False, [(0, 9)], True),
        ("<think>a</think>b", True, [(0, 16)], True),
        ("x<think>a", False, [(1, 9)], False),
        ("a</think>b<think>c</think>d</think>", True, [(0, 9), (10, 26)], True),
    ],
)
def test_segments(text, opened, found, closed):
    assert segments(text, "<think>", "</think>", opened=opened) == (found, closed)


def read(thinking: Thinking, prompt: Any, texts: list[str], made: PreTrainedTokenizerFast) -> Any:
    ids = [made(text)["input_ids"] for text in texts]
    shown = made.batch_decode(ids, skip_special_tokens=True)
    return thinking.read(prompt, shown, ids, count=True)


@pytest.mark.parametrize("piece", ["<think></think>", "<think>a</think>b", "</think>", "<think>é\u2028</think>"])
def test_the_cost_of_counting_grows_as_the_number_of_tokens(monkeypatch, piece):
    made = tokenizer()
    thinking = Thinking(ThinkingSection(), made, {})
    read = list[int]()
    decode = type(made).decode

    def counted(self: Any, ids: list[int], **options: Any) -> str:
        read.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(type(made), "decode", counted)
    costs = []
    for times in (100, 800):
        read.clear()
        thinking.count(made(piece * times)["input_ids"], opened=False)
        costs.append(sum(read))
    assert costs[1] < 1.5 * 8 * costs[0]


def test_what_stands_between_thoughts_is_the_answer():
    made = tokenizer()
    found = Thinking(ThinkingSection(), made, {}).read(
        "p", ["a<think>b</think>c<think></think>d<think>e"], [[]], count=False
    )
    assert (found.answers, found.is_closed) == (["acd"], [False])


def test_tags_alone_are_all_counted():
    made = tokenizer()
    ids = made("<think></think>" * 500 + "<think>")["input_ids"]
    assert (len(ids), Thinking(ThinkingSection(), made, {}).count(ids, opened=False)) == (1001, 1001)


@pytest.mark.parametrize("special", [False, True])
def test_answers_and_tokens(special):
    made = tokenizer(special)
    texts = ["<think>abc</think> 42<eos>", "42<eos>", "a<think>bc", "ab</think>42"]
    found = read(Thinking(ThinkingSection(), made, {}), "p", texts, made)
    assert found.answers == ["42", "42", "a", "42"]
    assert found.is_closed == [True, True, False, True]
    assert found.num_tokens == [5, 0, 3, 3]


def test_tags_of_many_tokens_and_a_prompt_that_opens():
    made = tokenizer()
    tags = ThinkingSection(open="<a>", close="</a>")
    found = read(Thinking(tags, made, {}), "p <a>\n", ["bc</a>7", "bc"], made)
    assert (found.answers, found.is_closed, found.num_tokens) == (["7", ""], [True, False], [6, 2])
    asked = [{"role": "user", "content": "p"}]
    for tail, closed in (("<a>", False), ("<a></a>", True)):
        thinking = Thinking(tags, made, {"tail": tail})
        found = thinking.read(asked, [[{"role": "assistant", "content": "bc"}]], [[1, 2]], count=True)
        assert (found.is_closed, found.num_tokens) == ([closed], [0 if closed else 2])


def test_every_assistant_message_loses_its_reasoning():
    said = [
        {"role": "assistant", "content": "<think>x</think>call"},
        {"role": "tool", "content": "<think>"},
        {"role": "assistant", "content": "<think>y</think>4"},
    ]
    found = Thinking(ThinkingSection(), tokenizer(), {}).read("p", [said], [[]], count=False)
    assert [message["content"] for message in found.answers[0]] == ["call", "<think>", "4"]
    assert (found.is_closed, found.num_tokens) == ([True], [])


@pytest.mark.long
@pytest.mark.parametrize(("unclosed", "last"), [(-1.0, [-1, 0, -0.25]), ("missing", [np.nan] * 3)])
def test_the_pool_strips_counts_and_scores_what_never_ends(unclosed, last):
    made = tokenizer()
    functions = [
        {"function": "exact_match"},
        {"function": "exact_match", "name": "whole", "strip_thinking": False},
        {"function": "reasoning_length", "options": {"per_token": 0.125}},
    ]
    texts = ["<think>ab</think>42", "42", "<think>4"]

    async def score(pool: RewardPool) -> np.ndarray:
        pool.read_with(made, {})
        rewards, _, failures, *_ = await pool.score(
            "p", texts, [made(text)["input_ids"] for text in texts], {"answer": "42"}
        )
        expected = [("exact_match", "unclosed", (2,))] if unclosed == "missing" else []
        assert [(one.function, one.reason, one.completions) for one in failures.entries()] == expected
        return rewards

    rewards = with_pool(section(*functions, thinking={"strip": True, "unclosed": unclosed}), score)
    np.testing.assert_array_equal(rewards, [[1, 0, -0.5], [1, 1, 0], last])


@pytest.mark.parametrize(
    ("unclosed", "shown", "rewards"),
    [
        (0.0, ["4"], [0.0, 1.0]),
        (-0.5, ["4"], [-0.5, 1.0]),
        ("missing", ["4"], [math.nan, 1.0]),
        ("as_is", ["<think>4", "4"], [2.0, 1.0]),
    ],
)
def test_unclosed_reasoning_scores_as_configured(unclosed, shown, rewards):
    functions = [
        {"function": "a:stripped"},
        {"function": "a:whole", "strip_thinking": False},
        {"function": "reasoning_length"},
    ]
    rewards_section = section(*functions, thinking={"strip": True, "unclosed": unclosed})
    assert rewards_section.reads_thinking
    reasoning = Reasoning(["", "4"], [False, True], [3, 2])
    job = Job("p", ["<think>4", "<think></think>4"], [[1], [2]], {})
    (stripped, hidden), whole, counted = (
        view(job, reasoning, unclosed, counts=each.counts_reasoning, strips=rewards_section.strips(each))
        for each in rewards_section.functions
    )
    assert stripped.completions == shown
    assert stripped.completion_ids == [[1], [2]][-len(shown) :]
    last = len(shown) - 1
    found = with_hidden_rows(Scores([2.0, 1.0][-len(shown) :], failed={last: ("timeout", "slow")}), hidden)
    assert found.rewards == pytest.approx(rewards, nan_ok=True)
    assert found.failed == {1: ("timeout", "slow")}
    assert whole == (job, {})
    assert counted == (replace(job, reasoning_tokens=[3, 2]), {})
