"""Every option of a source works with every kind of source, or is refused by its name. A new option needs a line here."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pydantic import ValidationError

from consumer.prompts import opening
from consumer.prompts.dataset import PromptDataset
from protocol.config.data import DatasetSection, SourceSection
from protocol.errors import DatasetError


def rows_of(*numbers: int) -> list[dict[str, str]]:
    return [{"prompt": f"prompt {n}", "other": f"other {n}", "text": f"1+1={n}", "answer": str(n)} for n in numbers]


ROWS, TEST = rows_of(*range(10)), rows_of(10, 11)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def jsonl(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def array(path: Path) -> Path:
    path.write_text(json.dumps(ROWS))
    return path


def cells(path: Path, separator: str) -> Path:
    path.write_text("".join(separator.join(line) + "\n" for line in (ROWS[0], *(row.values() for row in ROWS))))
    return path


def packed(path: Path) -> Path:
    path.write_bytes(gzip.compress(jsonl(path.with_suffix("")).read_bytes()))
    return path


def parquet(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    return path


def arrow(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


def pattern(folder: Path) -> Path:
    jsonl(folder / "a.jsonl", ROWS[:5])
    jsonl(folder / "b.jsonl", ROWS[5:])
    return folder / "[a-z].jsonl"


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    return folder


def saved_splits(folder: Path) -> Path:
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(TEST)}
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


def folder_of_files(folder: Path) -> Path:
    jsonl(folder / "train-0.jsonl", ROWS[:5])
    jsonl(folder / "train-1.jsonl", ROWS[5:])
    jsonl(folder / "test.jsonl", TEST)
    return folder


def folder_of_parquet(folder: Path) -> Path:
    folder.mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(str(folder / "train.parquet"))
    datasets.Dataset.from_list(TEST).to_parquet(str(folder / "test.parquet"))
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda folder: jsonl(folder / "rows.jsonl"),
    "json": lambda folder: (
        Path(str(folder / "rows.json")) if (folder / "rows.json").write_text(json.dumps(ROWS)) else folder
    ),
    "csv": lambda folder: cells(folder / "rows.csv", ","),
    "tsv": lambda folder: cells(folder / "rows.tsv", "\t"),
    "gzip": lambda folder: packed(folder / "rows.jsonl.gz"),
    "parquet": lambda folder: parquet(folder / "rows.parquet"),
    "arrow": lambda folder: arrow(folder / "rows.arrow"),
    "pattern": lambda folder: pattern(folder / "several"),
    "saved": lambda folder: saved(folder / "saved"),
    "saved splits": lambda folder: saved_splits(folder / "splits"),
    "folder": lambda folder: folder_of_files(folder / "files"),
    "folder of parquet": lambda folder: folder_of_parquet(folder / "parquets"),
    "hub": lambda folder: folder_of_files(folder / "hub"),
}
ONE_SPLIT = {"jsonl", "json", "csv", "tsv", "gzip", "parquet", "arrow", "pattern", "saved"}
OF_FILES = ONE_SPLIT - {"saved"}
SAVED = {"saved", "saved splits"}
FOLDERS = {"folder", "folder of parquet"}

FUNCTIONS = """
def even(row):
    return int(row["answer"]) % 2 == 0

def renamed(row):
    return {"prompt": row["other"], "answer": row["answer"]}
"""


class Case:
    """Options, the numbers of the rows that they give of each kind of source, and the kinds that refuse them with a word."""

    def __init__(self, numbers: list[int], refused: dict[str, set[str]] | None = None, **options: Any) -> None:
        self.numbers, self.refused, self.options = numbers, refused or {}, options
        is_other = "transform" in options or options.get("prompt_column") == "other"
        self.prompts = [f"{'other' if is_other else 'prompt'} {number}" for number in numbers]


ALL = list(range(10))
NO_HUB = {"on this machine": set(KINDS) - {"hub"}}
CASES: dict[str, list[Case]] = {
    "path": [Case(ALL)],
    "subset": [
        Case(ALL, {"on this machine": OF_FILES | SAVED}, subset="default"),
        Case(ALL, {"on this machine": OF_FILES | SAVED, "not found": FOLDERS | {"hub"}}, subset="absent"),
    ],
    "revision": [Case(ALL, NO_HUB, revision="main")],
    "split": [
        Case([0, 1, 2, 3], split="train[:4]"),
        Case([9], split="train[90%:]"),
        Case([8, 9], split="train[-2:]"),
        Case(ALL, split="train[:1000]"),
        Case([0, 9], split="train[:1]+train[9:]"),
        Case([10, 11], {"Unknown split": ONE_SPLIT}, split="test"),
        Case([*ALL, 10], {"Unknown split": ONE_SPLIT}, split="train+test[:1]"),
        Case([], {"Unknown split": set(KINDS)}, split="dev"),
        Case([], {"has no rows": set(KINDS)}, split="train[:0]"),
        Case([], {"Unrecognized": set(KINDS)}, split="train[:4"),
    ],
    "streaming": [
        Case([0, 1, 2], streaming=True, max_rows=3),
        Case([0, 1, 2], {"parts of one": set(KINDS) - SAVED}, streaming=True, max_rows=3, split="train[:4]"),
        Case(
            [10, 11],
            {"Unknown split": {"saved"}, "has the splits train": OF_FILES},
            streaming=True,
            max_rows=3,
            split="test",
        ),
    ],
    "max_rows": [Case([0, 1], max_rows=2), Case([5, 6], max_rows=2, split="train[50%:]"), Case(ALL, max_rows=99)],
    "prompt_column": [Case(ALL, prompt_column="other"), Case([], {"no column": set(KINDS)}, prompt_column="absent")],
    "answer_column": [Case(ALL, answer_column="answer"), Case([], {"no column": set(KINDS)}, answer_column="absent")],
    "environment": [Case(ALL, environment="maze")],
    "blocks": [Case(ALL, blocks={"context": 4, "continuation": 1})],
    "filter": [Case([0, 2, 4, 6, 8], filter="task.py:even")],
    "transform": [Case(ALL, transform="task.py:renamed")],
}
OF_REASONING_GYM = {"reasoning_gym", "size", "seed", "config", "difficulty", "template"}
OF_LISTS = {"name", "level", "weight", "judge"}  # they are of prompts: test_mixture.py and the tests of the ledger


def test_every_option_has_a_line() -> None:
    assert CASES.keys() | OF_REASONING_GYM | OF_LISTS == SourceSection.model_fields.keys()


def test_rows_of_reasoning_gym_and_rows_that_are_read_share_the_options_of_prompts() -> None:
    made = {"reasoning_gym": "chain_sum", "size": 1}
    for option, cases in CASES.items():
        options = {"path": "rows.jsonl"} if option == "path" else {option: cases[0].options[option]}
        if option in ("path", "subset", "revision", "split", "streaming", "blocks"):
            with pytest.raises(ValidationError, match=f"`{option}` is of rows that are read"):
                SourceSection(**made | options)
        else:
            SourceSection(**made | options)
    values = {"size": 1, "seed": 2, "config": {"a": 1}, "difficulty": 1, "template": "{question}?"}
    for option in OF_REASONING_GYM - {"reasoning_gym"}:
        with pytest.raises(ValidationError, match=f"`{option}` is for reasoning_gym"):
            SourceSection(path="rows.jsonl", **{option: values[option]})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answers for the data set `someone` with the folder `hub` beside it, and notes what it was asked for."""
    asked, real = [], opening.load_dataset_builder

    def load(path: str, name: str | None = None, *, revision: str | None = None, **options: Any) -> Any:
        folder = Path(path)
        if folder.name != "someone":
            return real(path, name, revision=revision, **options)
        asked.append({"subset": name, "revision": revision})
        return real(str(folder.parent / "hub"), name, **options)

    monkeypatch.setattr(opening, "load_dataset_builder", load)
    return asked


def opened(tmp_path: Path, kind: str, case: Case, model: Path, *, as_source: bool) -> PromptDataset:
    path = KINDS[kind](tmp_path)
    (tmp_path / "task.py").write_text(FUNCTIONS)
    options = {
        name: f"{tmp_path}/{value}" if str(value).startswith("task.py") else value
        for name, value in case.options.items()
    }
    options |= {"path": str(tmp_path / "someone" if kind == "hub" else path)}
    section = DatasetSection.model_validate({"sources": [options]} if as_source else options)
    environments = ["maze"] if "environment" in options else []
    return PromptDataset(section, model, environments=environments)


@pytest.mark.long
@pytest.mark.usefixtures("transformed_here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", CASES)
def test_an_option_works_or_is_refused(
    tmp_path: Path, tiny_model: Path, hub: list[dict[str, Any]], option: str, kind: str
) -> None:
    for number, case in enumerate(CASES[option]):
        folder = tmp_path / str(number)
        folder.mkdir()
        word = next((word for word, kinds in case.refused.items() if kind in kinds), None)
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        if word is not None:
            with pytest.raises(DatasetError, match=word):
                opened(folder, kind, case, tiny_model, as_source=bool(number % 2))
            continue
        prompts = opened(folder, kind, case, tiny_model, as_source=bool(number % 2))
        rows = [prompts[prompt_id] for prompt_id in range(len(prompts))]
        if option == "blocks":
            assert [(prompt, columns["answer"]) for prompt, columns in rows] == [
                ("1+1=", row["answer"]) for row in ROWS
            ]
            continue
        assert [prompt for prompt, _ in rows] == case.prompts, case.options
        assert [columns["answer"] for _, columns in rows] == [str(number) for number in case.numbers]
        assert {columns.get("environment") for _, columns in rows} == {case.options.get("environment")}
        if kind == "hub":
            assert hub[-1] == {name: case.options.get(name) for name in ("subset", "revision")}
