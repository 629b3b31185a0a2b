"""A user's transform runs in a process of its own, once for each row: what it makes is what it would make here."""

import json
import logging
import os
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
from datasets import Dataset

from consumer.prompts.dataset import PromptDataset
from consumer.prompts.opening import load_rows
from consumer.prompts.rows import RowReader, Verdict
from consumer.prompts.source_rows import Rows
from consumer.prompts.transform import TransformProcess, packed, unpacked
from protocol.config.data import DatasetSection, SourceSection
from protocol.errors import DatasetError

TRANSFORMS = """
import ctypes, os

def to_prompt(row):
    print("a line that belongs to nobody")
    return {"prompt": f"{row['n']}+1=", "answer": row["n"] + 1, "kept": row, "process": os.getpid()}

def small(row):
    if row["kind"] == "ends in the filter":
        os._exit(7)
    return True

def awkward(row):
    kind = row["kind"]
    if kind == "hangs":
        ctypes.PyDLL(None).sleep(1000)  # and no other thread of the process runs
    elif kind == "raises":
        raise KeyError("answer")
    elif kind == "ends":
        os._exit(7)
    elif kind == "skips":
        return None
    return {"prompt": kind, "object": object() if kind == "object" else 0}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "transforms.py").write_text(TRANSFORMS)
    return tmp_path


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reader(folder: Path, kinds: list[str]) -> RowReader:
    path = written(folder, [{"kind": kind} for kind in kinds])
    section = SourceSection(
        path=path, transform=f"{folder}/transforms.py:awkward", filter=f"{folder}/transforms.py:small"
    )
    return RowReader(section, "dataset", load_rows(section, "dataset"))


def test_a_row_comes_out_of_its_packing_with_every_type() -> None:
    rows = Dataset.from_list(
        [
            {"at": datetime(2026, 1, number), "nested": [{"text": "é", "none": None}], "raw": b"\0", "n": 2.5}
            for number in (1, 2)
        ]
    )
    kept = [Rows(rows.select([1, 0]))[number] for number in (0, 1)]
    assert [unpacked(packed(row)) for row in kept] == kept
    assert kept[0] == {"at": "2026-01-02T00:00:00", "nested": [{"text": "é", "none": None}], "raw": b"\0", "n": 2.5}
    assert unpacked(packed({"n": 2**70})) == {"n": 2**70}


@pytest.mark.long
def test_prompts_come_from_another_process_and_are_made_once(folder: Path) -> None:
    plain = folder / "plain.jsonl"
    plain.write_text(json.dumps({"prompt": "plain"}) + "\n")
    path = written(folder, [{"n": n} for n in range(40)])
    section = DatasetSection(
        sources=[{"path": path, "transform": f"{folder}/transforms.py:to_prompt"}, {"path": str(plain)}]
    )
    first, again = PromptDataset(section), PromptDataset(section)
    for prompts in (first, again):
        made = [prompts[prompt_id] for prompt_id in range(41)]
        [process] = {columns.pop("process") for _, columns in made[:40]}
        assert made == [*((f"{n}+1=", {"answer": n + 1, "kept": {"n": n}}) for n in range(40)), ("plain", {})]
        assert process != os.getpid()
        assert not psutil.pid_exists(process)
    assert first[3] == again[3], "the second start took what the first one made"


@pytest.mark.long
def test_a_row_on_which_a_function_hangs_or_ends_its_process_is_refused_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("consumer.prompts.transform._SAY_EVERY_S", 0.5)
    kinds = ["fine", "hangs", "raises", "ends", "skips", "object", "ends in the filter", "fine"]
    rows = reader(folder, kinds)
    with closing(TransformProcess(rows, limit_s=2.0)) as process, caplog.at_level(logging.WARNING):
        found = [process.judge(number) for number in range(len(kinds))]
        assert process.num_ended == 3
    path, unusable = f"of {folder}/train.jsonl", Verdict.UNUSABLE
    assert [(one.verdict, one.problem) for one in found] == [
        (Verdict.KEPT, ""),
        (unusable, f"dataset.transform gave nothing for row 1 {path}: it had not returned after 2 s"),
        (unusable, f"dataset.transform raised on row 2 {path}: KeyError: 'answer'"),
        (unusable, f"dataset.transform gave nothing for row 3 {path}: its process ended (exit status 7)"),
        (Verdict.TRANSFORMED_AWAY, ""),
        (
            unusable,
            f"dataset.transform: row 5 {path}: the value of 'object' cannot be sent to a producer: Encoding objects of "
            "type object is unsupported; make a text of it, or drop it (a `transform` can)",
        ),
        (unusable, f"dataset.transform gave nothing for row 6 {path}: its process ended (exit status 7)"),
        (Verdict.KEPT, ""),
    ]
    assert f"the start waits for dataset.transform on row 1 {path}" in caplog.text


@pytest.mark.long
def test_a_row_whose_process_ended_is_tried_again_at_the_next_start(folder: Path) -> None:
    path = written(folder, [{"kind": "fine"}, {"kind": "ends"}])
    with pytest.raises(DatasetError, match="gave nothing for row 1"):
        PromptDataset(DatasetSection(path=path, transform=f"{folder}/transforms.py:awkward"))[1]
    assert list((folder / "cache" / "slipstream").iterdir()) == [], "nothing is kept of this pass"
