"""Documents that are cut into blocks: by hand, with characters of several tokens, and what cannot be cut."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from consumer.prompts.blocks import cut_text
from consumer.prompts.dataset import PromptDataset
from protocol.config.data import BlocksSection, DatasetSection
from protocol.errors import DatasetError
from tests.integration.models import byte_bpe_tokenizer, char_tokenizer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model whose tokens are characters."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    char_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def opened(model: Path, rows: list[dict[str, Any]], **blocks: Any) -> PromptDataset:
    path = model.parent / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset(DatasetSection(path=str(path), blocks=blocks), model)


@pytest.mark.parametrize(
    ("text", "options", "blocks"),
    [
        ("abcdefghij", {"stride": 2}, [("abc", "de"), ("cde", "fg"), ("efg", "hi")]),
        ("abcdefghij", {}, [("abc", "de"), ("cde", "fg"), ("efg", "hi")]),
        ("abcdefghij", {"stride": 5}, [("abc", "de"), ("fgh", "ij")]),
        ("abcde", {"stride": 1}, [("abc", "de")]),
        ("abcd", {"stride": 1}, []),
        ("", {}, []),
    ],
)
def test_blocks_by_hand(text: str, options: dict[str, int], blocks: list[tuple[str, str]]) -> None:
    assert cut_text(text, char_tokenizer(), BlocksSection(context=3, continuation=2, **options)) == blocks


def test_characters_of_several_tokens_are_never_cut() -> None:
    text = "Wie heißt du? 你好, 世界! 🙂 ¡Ünïcödé! 漢字かな交じり文 🙃🙃"
    found = cut_text(text, byte_bpe_tokenizer(), BlocksSection(context=4, continuation=3, stride=1))
    assert len(found) > 20
    for prompt, answer in found:
        assert prompt + answer in text
        assert prompt
        assert answer


def test_a_block_is_a_row_with_the_other_columns_of_its_document(model: Path) -> None:
    rows = [{"text": "ab", "n": 0}, {"text": None, "n": 1}, {"text": "abcdefg", "n": 2}, {"text": "vwxyz", "n": 3}]
    prompts = opened(model, rows, context=3, continuation=2)
    wanted = [("abc", "de", 2), ("cde", "fg", 2), ("vwx", "yz", 3)]
    assert [prompts[i] for i in range(len(prompts))] == [(p, {"answer": a, "n": n}) for p, a, n in wanted]
    assert prompts.digest == opened(model, rows, context=3, continuation=2).digest
    assert prompts.digest != opened(model, rows, context=3, continuation=2, stride=1).digest


def test_what_cannot_be_cut(model: Path) -> None:
    with pytest.raises(DatasetError, match=r"dataset\.blocks\.column: .* has no column 'text'; it has 'page'"):
        opened(model, [{"page": "abcdef"}], context=3, continuation=2)
    with pytest.raises(DatasetError, match=r"'text' of .* holds no texts"):
        opened(model, [{"text": 3}], context=3, continuation=2)
    with pytest.raises(DatasetError, match=r"no document of .* has 5 tokens"):
        opened(model, [{"text": "abcd"}, {"text": ""}], context=3, continuation=2)


@pytest.mark.parametrize(
    "blocks", [{"context": 3}, {"context": 0, "continuation": 2}, {"context": 3, "continuation": 2, "stride": 0}]
)
def test_what_is_no_section(blocks: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="blocks"):
        DatasetSection.model_validate({"path": "x", "blocks": blocks})
