"""A user's transform runs in a process of its own: what it makes is what it would make here, and nothing waits for it."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from datasets import Dataset

from consumer.prompts.dataset import Placeholders, PromptDataset
from consumer.prompts.transform_worker import Job, Made, made, packed, unpacked
from consumer.prompts.transformed import TransformedPrompts, read_aside
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError
from tests.unit.protocol.channel_harness import PATIENCE_S

TRANSFORMS = """
import os, re, time

def to_prompt(row):
    print("a line that belongs to nobody")
    return {"prompt": f"{row['n']}+1=", "answer": row["n"] + 1, "kept": row}

def awkward(row):
    kind = row["kind"]
    if os.environ.get("SLIPSTREAM_TEST_HARMLESS"):
        kind = "fine"
    if kind == "hangs":
        re.match(r"(a+)+$", "a" * 60 + "b")  # for years, and no other thread of the process runs
    elif kind == "raises":
        raise KeyError("answer")
    elif kind == "ends":
        os._exit(7)
    elif kind == "skips":
        return None
    return {"prompt": kind, "object": object() if kind == "object" else 0}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "transforms.py").write_text(TRANSFORMS)
    return tmp_path


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(folder: Path, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> PromptDataset:
    """All rows pass when the dataset is opened."""
    rows = [{"kind": kind} for kind in kinds]
    transform = f"{folder}/transforms.py:awkward"
    monkeypatch.setenv("SLIPSTREAM_TEST_HARMLESS", "1")
    prompts = PromptDataset(DatasetSection(path=written(folder, rows), transform=transform))
    monkeypatch.delenv("SLIPSTREAM_TEST_HARMLESS")
    return prompts


@contextmanager
def asking(prompts: PromptDataset, limit_s: float = 60.0) -> Iterator[Any]:
    """What comes of some prompts that are asked for together, in their order."""
    with closing(TransformedPrompts(prompts, lambda: None, limit_s)) as source:

        def wait(prompt_id: int) -> Any:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    found = source[prompt_id]
                except DatasetError as error:
                    return str(error)
                if found is not None:
                    return found
                assert time.monotonic() < deadline
                time.sleep(0.005)

        def ask(*prompt_ids: int) -> list[Any]:
            assert [source[prompt_id] for prompt_id in prompt_ids] == [None] * len(prompt_ids), "they are being read"
            return [wait(prompt_id) for prompt_id in prompt_ids]

        yield ask


def test_a_row_comes_out_of_its_packing_with_every_type(tmp_path: Path) -> None:
    rows = Dataset.from_list(
        [
            {"at": datetime(2026, 1, number), "nested": [{"text": "é", "none": None}], "raw": b"\0", "n": 2.5}
            for number in (1, 2)
        ]
    )
    rows = rows.select([1, 0])
    assert [unpacked(packed(rows.with_format("arrow"), number)) for number in (0, 1)] == [rows[0], rows[1]]


@pytest.mark.parametrize("kind", ["fine", "raises", "skips", "object"])
def test_what_the_worker_says_of_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    prompts = opened(folder, [kind], monkeypatch)
    [reader] = prompts.readers
    answer = made([reader], Job(0, 0, packed(reader.rows.with_format("arrow"), 0)))
    place = f"row 0 of {folder}/train.jsonl"
    problem = {
        "raises": f"dataset.transform raised on {place}: KeyError: 'answer'",
        "skips": f"dataset.transform skips {place} now, and did not before",
        "object": f"dataset.transform: {place} cannot be sent: Encoding objects of type object is unsupported",
    }
    expected = Made(problem=problem[kind]) if kind in problem else Made("fine", {"object": 0})
    assert msgspec.msgpack.decode(answer, type=Made) == expected


@pytest.mark.long
def test_prompts_are_those_that_the_dataset_itself_has(folder: Path) -> None:
    path = written(folder, [{"n": n} for n in range(40)])
    plain = folder / "plain.jsonl"
    plain.write_text(json.dumps({"prompt": "plain"}) + "\n")
    sources = [{"path": path, "transform": f"{folder}/transforms.py:to_prompt"}, {"path": str(plain)}]
    prompts = PromptDataset(DatasetSection(sources=sources))
    order = [*range(39, -1, -1), 40]
    with asking(prompts) as ask:
        assert ask(*order) == [prompts[prompt_id] for prompt_id in order]
        assert ask(3) == [prompts[3]], "as often as it is asked for"


@pytest.mark.long
def test_a_row_on_which_the_transform_hangs_or_ends_its_process_is_refused_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["fine", "hangs", "raises", "ends", "fine"]
    with asking(opened(folder, kinds, monkeypatch), limit_s=5.0) as ask:
        found = ask(*range(5))
    rows = f"of {folder}/train.jsonl"
    assert found == [
        ("fine", {"object": 0}),
        f"dataset.transform gave nothing for row 1 {rows}: it had not returned after 5 s",
        f"dataset.transform raised on row 2 {rows}: KeyError: 'answer'",
        f"dataset.transform gave nothing for row 3 {rows}: its process ended (exit status 7)",
        ("fine", {"object": 0}),
    ]


@pytest.mark.long
def test_the_log_says_for_which_row_prompts_wait_and_the_end_does_not_wait_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("consumer.prompts.transformed._SAY_EVERY_S", 0.1)
    prompts = opened(folder, ["hangs"], monkeypatch)
    source = TransformedPrompts(prompts, lambda: None)
    deadline = time.monotonic() + PATIENCE_S
    while f"prompts wait for the transform, at work on row 0 of {folder}/train.jsonl" not in caplog.text:
        assert source[0] is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert source._child is not None
    process = psutil.Process(source._child.process.pid)
    source.close()
    assert not process.is_running()


def test_without_a_transform_the_dataset_itself_is_asked(folder: Path) -> None:
    prompts = PromptDataset(DatasetSection(path=written(folder, [{"prompt": "1+1="}])))
    with read_aside(prompts, lambda: None) as source:
        assert source is prompts
    placeholders = Placeholders()
    with read_aside(placeholders, lambda: None) as source:
        assert source is placeholders
