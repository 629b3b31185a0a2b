"""The tokens of reference answers: behind text and messages, with an end as completions have, and none where a row has none."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from consumer.prompts.answers import Answers, answer_token_ids
from consumer.prompts.dataset import PromptDataset
from protocol.config.rewards import ThinkingSection
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
        assert found(answers([True, {"1": 1}, [], ["1", None]]), 0, 1, 2, 3) == [None] * 4
    [record] = caplog.records
    assert "row 0 of" in record.getMessage()
    assert "'right'" in record.getMessage()


def test_an_answer_is_what_the_row_says_and_of_several_the_first(answers: Callable[..., Answers]) -> None:
    by_text = found(answers(["1", "12", "3"]), 0, 1, 2)
    assert found(answers([1.0, 12, ["3", "4"]]), 0, 1, 2) == by_text


TAGS = ThinkingSection()


def of_messages(template: str, answer: str, tags: ThinkingSection = TAGS, **template_kwargs: Any) -> tuple[str, str]:
    """The prompt and the answer behind it, as text."""
    tokenizer = byte_bpe_tokenizer()
    tokenizer.chat_template = template
    prompt_ids = prompt_token_ids(tokenizer, [USER], template_kwargs)
    ids = answer_token_ids(tokenizer, [USER], prompt_ids, answer, template_kwargs, tags)
    return tokenizer.decode(prompt_ids), tokenizer.decode(ids)


NO_PROMPT = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}> "
OPEN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split(close)[-1] }}{{ end }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ opening }}{% endif %}"
)
"""Opens a thought in the prompt and strips it from answers, as that of DeepSeek-R1."""


@pytest.mark.parametrize(
    ("template", "kwargs", "answer", "expected"),
    [
        (CHAT_TEMPLATE, {}, "five.", "five.<|end|>"),
        (CHAT_TEMPLATE, {}, "d", "d<|end|>"),
        (QWEN, {"opening": "<think>\n\n</think>\n\n"}, "five.", "five.<|end|>"),
        (QWEN, {"opening": "<think>\n\n</think>\n\n"}, "think", "think<|end|>"),
        (QWEN, {}, "<think>2 + 3</think>n", "<think>2 + 3</think>n<|end|>"),
        (QWEN, {"opening": "<think>\n"}, "2 + 3\n</think>\nd", "2 + 3\n</think>\nd<|end|>"),
        (QWEN, {"opening": "<think>\n"}, "<think>\n2 + 3\n</think>\nd", "2 + 3\n</think>\nd<|end|>"),
        (QWEN, {"opening": "Well, "}, "five.", "five.<|end|>"),
        (NO_PROMPT, {}, "five.", "five.<|end|>"),
        (OPEN, {"opening": "", "end": " </s>\n<pad>", "close": "</think>"}, "s", "s </s>"),
        (OPEN, {"opening": "", "end": "", "close": "</think>"}, "d", "d<|end|>"),
        (OPEN, {"opening": "<think>\n", "end": "<|end|>", "close": "</think>"}, "5</think>d", "5</think>d<|end|>"),
        (OPEN, {"opening": "", "end": "<|end|>", "close": "</think>"}, "<think>5</think>d", "<think>5</think>d<|end|>"),
        (OPEN, {"opening": "[THINK]", "end": "<|end|>", "close": "[/THINK]"}, "[THINK]5[/THINK]d", "5[/THINK]d<|end|>"),
        (OPEN, {"opening": "<|channel>thought\n<channel|>", "end": "<|end|>", "close": "-"}, "5", "5<|end|>"),
        (OPEN, {"opening": "<|START_THINKING|><|END_THINKING|>", "end": "<|end|>", "close": "-"}, "5", "5<|end|>"),
    ],
)
def test_answers_behind_messages_are_what_the_template_writes_up_to_the_end_of_the_turn(
    template: str, kwargs: dict[str, str], answer: str, expected: str
) -> None:
    prompt, trained = of_messages(template, answer, **kwargs)
    assert "What is the sum?" in prompt
    assert trained == expected


@pytest.mark.parametrize(
    ("template", "kwargs", "answer"),
    [
        (QWEN, {}, "think"),
        (QWEN, {}, "five."),
        (QWEN, {"opening": "<think>\n"}, "five."),
        *(
            (OPEN, {"opening": opening, "end": "<|end|>", "close": "</think>"}, "d")
            for opening in (
                "<think>\n", "[THINK]", "<|START_THINKING|>", "<seed:think>", "<|channel>thought\n", "<|begin_of_thought|>\n\n"
            )
        ),
    ],
)  # fmt: skip
def test_an_answer_without_a_thought_is_refused_where_the_template_opens_or_writes_one(
    template: str, kwargs: dict[str, str], answer: str
) -> None:
    with pytest.raises(DatasetError, match="would learn not to think"):
        of_messages(template, answer, **kwargs)


def test_tags_of_the_configuration_are_tags_of_thoughts() -> None:
    kwargs = {"opening": "<|inner|>", "end": "<|end|>", "close": "-"}
    tags = ThinkingSection(open="<|inner|>", close="<|outer|>")
    with pytest.raises(DatasetError, match=r"<\|inner\|>"):
        of_messages(OPEN, "five.", tags, **kwargs)
    assert of_messages(OPEN, "2 + 3<|outer|>five.", tags, **kwargs)[1] == "2 + 3<|outer|>five.<|end|>"


def test_no_answer_stands_inside_of_a_thought_that_a_text_opens() -> None:
    tokenizer = byte_bpe_tokenizer()
    with pytest.raises(DatasetError, match="would learn not to think"):
        answer_token_ids(tokenizer, "The sum?<think>\n", [], "5", {}, TAGS)
    prompt = "What do you think"
    behind = answer_token_ids(tokenizer, prompt, tokenizer(text=prompt)["input_ids"], "5", {}, TAGS)
    assert behind == [*tokenizer(text="5")["input_ids"], tokenizer.eos_token_id]


BAR = "\uff5c"  # of DeepSeek's tokens
MARKS = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<bos>",
    ),
    *("<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    *(
        "<|return|>",
        "<|endoftext|>",
        "<|END_RESPONSE|>",
        "<|START_RESPONSE|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|assistant|>",
    ),
    *(f"<{BAR}end\u2581of\u2581sentence{BAR}>", f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"),
]


@pytest.fixture(scope="module")
def of_trl() -> Callable[..., str]:
    """Return the text that is trained with a chat template that TRL ships, for an answer and arguments of the template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()

    def trained(name: str, answer: str, **kwargs: Any) -> str:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=raw, eos_token="<|endoftext|>", bos_token="<bos>", additional_special_tokens=MARKS
        )
        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
        prompt_ids = prompt_token_ids(tokenizer, [USER], kwargs)
        ids = answer_token_ids(tokenizer, [USER], prompt_ids, answer, kwargs, TAGS)
        return str(tokenizer.decode(ids))

    return trained


@pytest.mark.parametrize("answer", ["4", "d", "e", "think"])
@pytest.mark.parametrize(
    ("name", "kwargs", "end"),
    [
        ("qwen3", {"enable_thinking": False}, "<|im_end|>"),
        ("qwen3_5_think", {"enable_thinking": False}, "<|im_end|>"),
        ("nemotron_3_nano", {"enable_thinking": False}, "<|im_end|>"),
        ("qwen2_5", {}, "<|im_end|>"),
        ("gemma3", {}, "<end_of_turn>"),
        ("gemma4_v5", {}, "<turn|>"),
        ("llama3_2", {}, "<|eot_id|>"),
        ("phi3_5", {}, "<|end|>"),
        ("cohere2", {}, "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    ],
)
def test_templates_without_a_thought_train_the_answer_alone(
    of_trl: Callable[..., str], name: str, kwargs: dict[str, Any], end: str, answer: str
) -> None:
    assert of_trl(name, answer, **kwargs) == answer + end


def test_templates_that_write_the_form_of_an_answer(of_trl: Callable[..., str]) -> None:
    assert of_trl("gptoss", "d") == "<|channel|>final<|message|>d<|return|>"
    assert of_trl("glm4moe", "d", enable_thinking=False) == "\nd<|endoftext|>", "no end of its own"


@pytest.mark.parametrize(
    ("name", "opened"),
    [("qwen3", False), ("glm4moe", False)]
    + [(name, True) for name in ("qwen3_5_think", "qwen3_6", "qwen3_8", "deepseek_r1_distill", "nemotron_3_super")],
)
def test_templates_of_models_that_think_train_answers_with_a_thought(
    of_trl: Callable[..., str], name: str, opened: bool
) -> None:
    for answer in ("4", "d"):
        with pytest.raises(DatasetError, match="would learn not to think"):
            of_trl(name, answer)
    trained = "".join(of_trl(name, "<think>\nxx\n</think>\n\nd").split())
    assert trained.startswith("xx</think>d<" if opened else "<think>xx</think>d<")
    assert trained.count("d<") == 1


def test_tokens_that_reach_over_the_border_are_not_taken() -> None:
    """`sum` is one token of this vocabulary, and the policy saw `su`."""
    tokenizer = byte_bpe_tokenizer()
    prompt_ids = prompt_token_ids(tokenizer, "The su", {})
    whole = tokenizer(text="The sum is five.")["input_ids"]
    assert whole[: len(prompt_ids)] != prompt_ids
    ids = answer_token_ids(tokenizer, "The su", prompt_ids, "m is five.", {}, TAGS)
    assert ids == [*tokenizer(text="m is five.")["input_ids"], tokenizer.eos_token_id]


def test_an_answer_with_a_token_that_the_model_does_not_have_is_left_out(
    answers: Callable[..., Answers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, knows = answers(["1", "9"]), char_tokenizer().convert_tokens_to_ids("9")
    monkeypatch.setattr(made, "_vocab_size", knows)
    assert found(made, 0, 1) == [[4, 1], None]
    assert f"the answer has token {knows} ('9')" in caplog.text
    assert "resize_token_embeddings" in caplog.text
