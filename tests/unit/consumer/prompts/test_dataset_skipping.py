"""Rows that are left out are counted and said, judged once, and do not move the numbers in messages."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from consumer.prompts.dataset import PromptDataset
from consumer.prompts.rows import RowReader
from protocol.config import functions
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError
from tests.integration.models import build_model

TASK = """
def even(row):
    return row["n"] % 2 == 0

def to_prompt(row):
    if row["n"] == 4:
        return None
    return {"prompt": str(row["n"]) * row["n"], "half": row["n"] // 2 if row["n"] != 6 else 1 // 0}

def silent(row):
    pass

def broken(row):
    return 1 // (row["n"] - 3) > 0

def wrong(row):
    return [row]

def numbered(row):
    return row | {3: "a column without a name"}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Ten rows, n = 0 to 9, and a file of functions."""
    (tmp_path / "task.py").write_text(TASK)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"n{n}", "n": n}) + "\n" for n in range(10)))
    return path


def opened(rows: Path, model: Path | None = None, **options: Any) -> PromptDataset:
    for name in ("filter", "transform"):
        if name in options:
            options[name] = f"{rows.parent}/task.py:{options[name]}"
    return PromptDataset(DatasetSection(path=str(rows), **options), model)


def test_filtered_rows_are_left_out_and_counted(rows: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompts = opened(rows, filter="even")
    assert [prompts[i] for i in range(len(prompts))] == [(f"n{n}", {"n": n}) for n in (0, 2, 4, 6, 8)]
    assert f"dataset: 5 of the 10 rows of {rows} are used; 5 refused by the filter" in caplog.text


@pytest.mark.usefixtures("transformed_here")
def test_a_transform_may_skip_and_what_raises_is_refused_alone_by_its_own_number(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = rows.with_name("late.jsonl")
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in (2, 4, 6, 8)))
    prompts = opened(path, transform="to_prompt")
    assert len(prompts) == 3
    assert prompts[0] == ("22", {"half": 1})
    assert prompts[2] == ("88888888", {"half": 4})
    with pytest.raises(DatasetError, match=rf"^dataset.transform raised on row 2 of {path}: ZeroDivisionError"):
        prompts[1]
    assert "1 skipped by the transform" in caplog.text
    assert (
        f"1 rows cannot be used and will each be refused; the first: dataset.transform raised on row 2 of {path}"
        in (caplog.text)
    )


def test_prompts_that_are_too_long_are_left_out(rows: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One token per character."""
    caplog.set_level(logging.INFO)
    path = rows.with_name("long.jsonl")
    texts = ["12", "1234", "123", "12345"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    prompts = opened(path, tiny_model, max_prompt_tokens=3)
    assert [prompts[i][0] for i in range(len(prompts))] == ["12", "123"]
    assert "2 longer than max_prompt_tokens=3" in caplog.text
    with pytest.raises(DatasetError, match=rf"^dataset: all 4 rows of {path} are skipped: 4 longer than max_prompt"):
        opened(path, tiny_model, max_prompt_tokens=1)


def test_the_length_is_that_of_the_rendered_template(tmp_path: Path) -> None:
    model = build_model("llama", tmp_path / "model")
    path = tmp_path / "chat.jsonl"
    chats = [[{"role": "user", "content": text}] for text in ("a", "aaaaaaaa")]
    path.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    assert len(opened(path, model, max_prompt_tokens=4)) == 1  # <|user|>, a, <|end|>, <|assistant|>
    with pytest.raises(DatasetError, match="all 2 rows"):
        opened(path, model, max_prompt_tokens=3)


def test_rows_are_judged_once(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(rows, filter="even")
    calls: list[int] = []
    real = RowReader.judge
    monkeypatch.setattr(RowReader, "judge", lambda *args: calls.append(args[-1]) or real(*args))
    os.utime(rows)
    assert len(opened(rows, filter="even")) == 5
    assert calls == [], "a file that was touched has the same rows"
    (rows.parent / "task.py").write_text(
        TASK.replace("== 0", "== 1") + "# longer, or bytecode of the same second would count\n"
    )
    functions._load_file.cache_clear()  # what another process would find
    other = opened(rows, filter="even")
    assert other[0][0] == "n1"
    assert len(calls) == 10, "another file of functions may decide otherwise"
    assert other.digest != first.digest


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "dataset.filter raised on row 3 of {}: ZeroDivisionError"),
        ("silent", "dataset.filter returned None for row 0 of {}; it must return True or False"),
    ],
)
def test_a_filter_that_does_not_say_ends_the_start(rows: Path, name: str, message: str) -> None:
    with pytest.raises(DatasetError) as caught:
        opened(rows, filter=name)
    assert str(caught.value).startswith(message.format(rows))


@pytest.mark.usefixtures("transformed_here")
@pytest.mark.parametrize("name", ["wrong", "numbered"])
def test_a_transform_that_returns_something_else(rows: Path, name: str) -> None:
    with pytest.raises(DatasetError, match=r"transform returned .* for row 0 of .*; it must return a dict or None"):
        opened(rows, transform=name)
