"""The tokens of reference answers: behind text and messages, with an end as completions have, and none where a row has none."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from consumer.prompts.answers import Answers, answer_token_ids
from consumer.prompts.dataset import PromptDataset
from protocol.config.run import RunConfig
from protocol.errors import DatasetError
from protocol.wire.messages import prompt_token_ids
from replay.batch_selection import TrainingBatch
from tests.integration.models import CHAT_TEMPLATE, byte_bpe_tokenizer, char_tokenizer
from tests.unit.consumer.builders import rollout_group, run_config

USER = {"role": "user", "content": "What is the sum?"}
QWEN = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['role'] == 'assistant' %}{% if '</think>' not in m['content'] %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{{ opening }}{% endif %}"
)
"""Writes what Qwen3's template writes: an empty thought before an answer, and a new line behind each turn."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def answers(tmp_path: Path, tiny_model: Path) -> Callable[..., Answers]:
    def made(values: list[Any], length: int = 6, **options: Any) -> Answers:
        rows = [{"prompt": f"{number}+1=", "right": value} for number, value in enumerate(values)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = {"path": str(tmp_path / "train.jsonl"), "answer_column": "right"} | options
        config = run_config(
            tmp_path, tiny_model, dataset=dataset, loss={"ce_coef": 0.1}, sampling={"max_completion_length": length}
        )
        return Answers(config, PromptDataset(config.dataset), tiny_model)

    return made


def found(answers: Answers, *prompt_ids: int) -> list[list[int] | None]:
    tokenizer = char_tokenizer()
    groups = [
        rollout_group([[3], [4]], prompt=tokenizer(f"{number}+1=")["input_ids"], lease_id=f"0-{number}-0-1-s")
        for number in prompt_ids
    ]
    batch = answers.add_to(TrainingBatch(1, 1, 1, groups, len(groups)))
    assert batch.groups == groups
    return [None if ids is None else ids.tolist() for ids in batch.answers]


def test_answers_behind_text_by_hand(answers: Callable[..., Answers]) -> None:
    """Digit d is token 3 + d, and the end of a text token 1."""
    assert found(answers(["12", None, "", "7"]), 3, 0, 1, 2, 0) == [[10, 1], [4, 5, 1], None, None, [4, 5, 1]]
    assert found(answers([1, 23]), 1) == [[5, 6, 1]], "numbers are written out"


def test_an_answer_that_is_longer_than_a_completion_is_cut_and_has_no_end(answers: Callable[..., Answers]) -> None:
    assert found(answers(["123", "1234", "12345"], length=4), 0, 1, 2) == [[4, 5, 6, 1], [4, 5, 6, 7], [4, 5, 6, 7]]


def test_sources_may_have_columns_of_their_own(tmp_path: Path, tiny_model: Path) -> None:
    sources = []
    for name, row in {"a": {"x": "1"}, "b": {"y": "2"}, "c": {"x": "3"}}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "0+1="} | row))
        column = {"a": "x", "b": "y", "c": None}[name]
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "answer_column": column})
    values = run_config(tmp_path, tiny_model).model_dump(exclude_unset=True)
    config = RunConfig.model_validate(values | {"dataset": {"sources": sources}, "loss": {"ce_coef": 1}})
    assert found(Answers(config, PromptDataset(config.dataset), tiny_model), 0, 1, 2) == [[4, 1], [5, 1], None]


def test_a_missing_column_is_refused_at_the_start(answers: Callable[..., Answers], tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        answers(["1"], answer_column="left")
    assert str(caught.value).startswith(f"dataset.answer_column: {tmp_path}/train.jsonl has no column 'left'")
    assert "'right'" in str(caught.value)


def test_an_answer_that_is_no_text_is_left_out_and_named_once(
    answers: Callable[..., Answers], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert found(answers([["1"], ["2"]]), 0, 1) == [None, None]
    [record] = caplog.records
    assert "row 0 of" in record.getMessage()
    assert "'right'" in record.getMessage()


def of_messages(template: str, answer: str, **template_kwargs: Any) -> tuple[str, str]:
    """The prompt and the answer behind it, as text."""
    tokenizer = byte_bpe_tokenizer()
    tokenizer.chat_template = template
    prompt_ids = prompt_token_ids(tokenizer, [USER], template_kwargs)
    ids = answer_token_ids(tokenizer, [USER], prompt_ids, answer, template_kwargs)
    return tokenizer.decode(prompt_ids), tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "opening", "expected"),
    [
        (CHAT_TEMPLATE, "", "five.<|end|>"),
        (QWEN, "", "<think>\n\n</think>\n\nfive.<|end|>"),
        (QWEN, "<think>\n\n</think>\n\n", "five.<|end|>"),
        (QWEN, "<think>\n", "\n</think>\n\nfive.<|end|>"),
        (QWEN, "Well, ", "five.<|end|>"),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}> ",
            "",
            "five.<|end|>",
        ),
    ],
)
def test_answers_behind_messages_are_what_the_template_writes_up_to_the_end_of_the_turn(
    template: str, opening: str, expected: str
) -> None:
    prompt, answer = of_messages(template, "five.", opening=opening)
    assert "What is the sum?" in prompt
    assert answer == expected


def test_tokens_that_reach_over_the_border_are_not_taken() -> None:
    """`sum` is one token of this vocabulary, and the policy saw `su`."""
    tokenizer = byte_bpe_tokenizer()
    prompt_ids = prompt_token_ids(tokenizer, "The su", {})
    whole = tokenizer(text="The sum is five.")["input_ids"]
    assert whole[: len(prompt_ids)] != prompt_ids
    ids = answer_token_ids(tokenizer, "The su", prompt_ids, "m is five.", {})
    assert ids == [*tokenizer(text="m is five.")["input_ids"], tokenizer.eos_token_id]
