"""A value reaches a reward as its file has it, whatever file it is, and what no message can carry is refused at the opening."""

import decimal
import gzip
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules.cache.cache import Cache

from consumer.prompts import opening
from consumer.prompts.dataset import PromptDataset
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError
from protocol.wire.codec import carried

TEXTS = [
    "2031-01-05", "2031-01-05T10:00:00Z", "10:30", "007", "31", "31.0", "1e5", "-0", "9007199254740993", "NA", "None", "null",
    "NaN", "nan", "true", "False", "  two spaces  ", "tab\there", "a\nb", "a\r\nb", 'a "quote", and a comma', "é", "e\u0301",
    "\u2028", "[1, 2]", "{}", "\ufeff", "ﬁ", "#", "\\", "0x10", "1_000", "+5", "inf", "P1D", "P1DT2H",
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def opened(path: Path | str, **options: Any) -> PromptDataset:
    return PromptDataset(DatasetSection(path=str(path), **options))


def answers_of(path: Path | str, **options: Any) -> list[Any]:
    prompts = opened(path, **options)
    return [carried(prompts[number])[1]["answer"] for number in range(len(prompts))]


def lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    return path


def of_texts() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"prompt": "p", "answer": text} for text in TEXTS])


def of_cells(path: Path, separator: str) -> None:
    cells = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    path.write_text(
        f"prompt{separator}answer\r\n" + "".join(f"p{separator}{cell}\r\n" for cell in cells),
        encoding="utf-8",
        newline="",
    )


def of_jsonl(path: Path) -> None:
    lines(path, *(json.dumps({"prompt": "p", "answer": text}, ensure_ascii=False) for text in TEXTS))


def of_gzip(path: Path) -> None:
    of_jsonl(path.with_suffix(""))
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))


def of_arrow(path: Path) -> None:
    table = of_texts().with_format("arrow")[:]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def of_folder(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    of_jsonl(path / "data" / "train.jsonl")


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": of_jsonl,
    "rows.jsonl.gz": of_gzip,
    "rows.json": lambda path: path.write_text(
        json.dumps([{"prompt": "p", "answer": text} for text in TEXTS], indent=1)
    ),
    "rows.csv": lambda path: of_cells(path, ","),
    "rows.tsv": lambda path: of_cells(path, "\t"),
    "rows.parquet": lambda path: of_texts().to_parquet(str(path)),
    "rows.arrow": of_arrow,
    "saved": lambda path: of_texts().save_to_disk(str(path)),
    "folder": of_folder,
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_text_stays_this_text(tmp_path: Path, name: str, streaming: bool) -> None:
    WRITERS[name](tmp_path / name)
    options = {"streaming": True, "max_rows": 100} if streaming else {}
    assert answers_of(tmp_path / name, **options) == TEXTS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_column_of_nothing_but_such_texts_has_no_other_type(tmp_path: Path, name: str) -> None:
    row = {"prompt": "p"} | {f"column {number}": text for number, text in enumerate(TEXTS)}
    path = tmp_path / name
    if path.suffix == ".csv":
        datasets.Dataset.from_list([row, row]).to_pandas().to_csv(path, index=False)
    else:
        lines(path, *([json.dumps(row)] * 2 if path.suffix == ".jsonl" else [json.dumps([row, row])]))
    assert opened(path)[1] == ("p", {name: text for name, text in row.items() if name != "prompt"})


@pytest.mark.usefixtures("transformed_here")
def test_a_transform_and_a_filter_get_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def same(row):\n    return row\ndef all_of_them(row):\n    return True\n")
    of_jsonl(tmp_path / "rows.jsonl")
    functions = {"transform": f"{tmp_path}/task.py:same", "filter": f"{tmp_path}/task.py:all_of_them"}
    assert answers_of(tmp_path / "rows.jsonl", **functions) == TEXTS


def test_values_of_several_types_arrive_as_they_are(tmp_path: Path) -> None:
    values = [5, "five", 5.5, None, True, ["2", -2], {"2031-01-05": "2031-01-05", "at": [{"day": "2031-01-06"}]}, 2**64 - 1,
              -(2**63), 2**53 + 1, 1e300, [], "5"]  # fmt: skip
    path = lines(tmp_path / "rows.jsonl", *(json.dumps({"prompt": "p", "answer": value}) for value in values))
    found = answers_of(path)
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


def test_a_column_that_a_row_lacks_is_none_and_nothing_is_added_within_a_value(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "1"}], [{"role": "user", "content": "2", "name": "me"}]]
    path = lines(
        tmp_path / "rows.jsonl",
        json.dumps({"prompt": messages[0], "answer": 1}),
        "",
        json.dumps({"prompt": messages[1], "hint": "h"}),
    )
    prompts = opened(path)
    assert [prompts[0], prompts[1]] == [
        (messages[0], {"answer": 1, "hint": None}),
        (messages[1], {"answer": None, "hint": "h"}),
    ]


def test_nan_and_marks_of_a_windows_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p", "answer": NaN}\r\n{"prompt": "p", "answer": -Infinity}\r\n')
    first, second = answers_of(path)
    assert np.isnan(first)
    assert second == -np.inf
    cells = tmp_path / "rows.csv"
    cells.write_bytes(b"\xef\xbb\xbfprompt,answer\r\np,\r\n")
    assert answers_of(cells) == [""], "an empty cell is an empty text"


def test_a_short_line_of_csv_ends_in_empty_texts_and_a_long_one_is_refused(tmp_path: Path) -> None:
    assert answers_of(lines(tmp_path / "short.csv", "prompt,answer", "p,1", "p")) == ["1", ""]
    with pytest.raises(DatasetError, match=r"more cells|Expected 2 fields"):
        opened(lines(tmp_path / "long.csv", "prompt,answer", "p,1", "p,1,2"))
    with pytest.raises(DatasetError, match="more cells"):
        opened(lines(tmp_path / "all.csv", "prompt,answer", "p,1,2"))


def test_types_of_arrow_become_texts_or_the_numbers_that_they_are(tmp_path: Path) -> None:
    stamp = datetime(2031, 1, 5, 10, 30)
    columns = {
        "day": pa.array([date(2031, 1, 5)]),
        "at": pa.array([stamp], pa.timestamp("ns")),
        "with_zone": pa.array([stamp.replace(tzinfo=UTC)], pa.timestamp("s", "UTC")),
        "clock": pa.array([time(10, 30)]),
        "long": pa.array([timedelta(hours=26)]),
        "price": pa.array([decimal.Decimal("12.50")]),
        "none": pa.array([decimal.Decimal("0E-10")], pa.decimal128(20, 10)),
        "single": pa.array([0.1], pa.float32()),
        "half": pa.array([np.float16(0.1)], pa.float16()),
        "double": pa.array([0.1]),
        "unsigned": pa.array([2**64 - 1], pa.uint64()),
        "kind": pa.array(["007"]).dictionary_encode(),
        "nested": pa.array([[{"day": date(2031, 1, 5)}]]),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"n": 18446744073709551615}'])),
    }
    pq.write_table(pa.table({"prompt": ["p"]} | columns), tmp_path / "rows.parquet")
    assert carried(opened(tmp_path / "rows.parquet")[0])[1] == {
        "day": "2031-01-05",
        "at": "2031-01-05T10:30:00",
        "with_zone": "2031-01-05T10:30:00+00:00",
        "clock": "10:30:00",
        "long": "1 day, 2:00:00",
        "price": "12.50",
        "none": "0.0000000000",
        "single": 0.1,
        "half": 0.1,
        "double": 0.1,
        "unsigned": 2**64 - 1,
        "kind": "007",
        "nested": [{"day": "2031-01-05"}],
        "json": {"n": 2**64 - 1},
    }


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.binary(), b"png"),
        (pa.struct({"bytes": pa.binary(), "path": pa.string()}), {"bytes": b"png", "path": "a.png"}),
        (pa.list_(pa.large_binary()), [b"png"]),
    ],
)
@pytest.mark.usefixtures("transformed_here")
def test_a_column_that_cannot_be_sent_is_named_at_the_opening(tmp_path: Path, kind: pa.DataType, value: Any) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "seen": pa.array([value], kind), "answer": ["a"]}), path)
    with pytest.raises(DatasetError, match=r"dataset: the column 'seen' of .*; drop it, .* with `transform`"):
        opened(path)
    (tmp_path / "task.py").write_text("def drop(row):\n    row.pop('seen')\n    return row\n")
    assert opened(path, transform=f"{tmp_path}/task.py:drop")[0] == ("p", {"answer": "a"})


@pytest.mark.usefixtures("transformed_here")
def test_pictures_and_sounds_are_not_decoded(tmp_path: Path) -> None:
    seen = {"bytes": b"no picture", "path": None}
    for kind in (datasets.Image(), datasets.Audio()):
        features = datasets.Features(
            {"prompt": datasets.Value("string"), "answer": datasets.Value("string"), "seen": kind}
        )
        path = tmp_path / type(kind).__name__
        rows = [{"prompt": "p", "answer": "a", "seen": seen}]
        datasets.Dataset(pa.Table.from_pylist(rows, features.arrow_schema)).save_to_disk(str(path))
        with pytest.raises(DatasetError, match="the column 'seen'"):
            opened(path)
        (tmp_path / "task.py").write_text("def drop(row):\n    row.pop('seen')\n    return row\n")
        assert opened(path, transform=f"{tmp_path}/task.py:drop")[0] == ("p", {"answer": "a"})


@pytest.mark.usefixtures("transformed_here")
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_named_with_its_line(tmp_path: Path, value: int) -> None:
    rows = [json.dumps({"prompt": "p", "answer": [{"n": one}]}) for one in (1, value)]
    path = lines(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(
        DatasetError, match=r"rows.jsonl, line 2: the value of 'answer' cannot be sent .* make a text of it"
    ):
        opened(path)
    (tmp_path / "task.py").write_text("def text(row):\n    return row | {'answer': str(row['answer'][0]['n'])}\n")
    assert answers_of(path, transform=f"{tmp_path}/task.py:text") == ["1", str(value)]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("twice.jsonl", '{"prompt": "p", "answer": 1, "answer": 2}', "line 1: the key 'answer' comes twice"),
        ("half.jsonl", '{"prompt": "\\ud800"}', "line 1: a text is no Unicode"),
        ("list.jsonl", '{"prompt": "p"}\n["p"]', "line 2: expected an object"),
        ("deep.jsonl", '{"prompt": ' + "[" * 100_000, "line 1: "),
        ("texts.json", '["p"]', "entry 0: expected an object"),
        ("cut.json", '[{"prompt": "p"}', "cut.json: Expecting"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError) as caught:
        opened(tmp_path / name)
    assert problem in str(caught.value)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", '{"prompt": "p", "answer": "1"}')
    assert answers_of(path) == ["1"]
    lines(path, '{"prompt": "p", "answer": "007"}')
    assert answers_of(path) == ["007"]


def test_what_another_program_kept_of_a_hub_dataset_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is not reached, so `datasets` takes what it has in its cache."""
    of_folder(tmp_path / "rows")
    real = opening.load_dataset_builder
    monkeypatch.setattr(
        opening, "load_dataset_builder", lambda *_, **__: Cache(dataset_name="rows", version="auto", hash="auto")
    )
    datasets.load_dataset(str(tmp_path / "rows"))
    with pytest.raises(DatasetError, match=r"another program, .* let it be reached once"):
        opened("someone/rows")
    with monkeypatch.context() as once:
        once.setattr(opening, "load_dataset_builder", lambda *_, **__: real(str(tmp_path / "rows")))
        assert answers_of("someone/rows") == TEXTS
    assert answers_of("someone/rows") == TEXTS
