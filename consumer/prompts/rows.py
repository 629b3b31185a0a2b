"""Makes rows from a source's data, and a prompt with its columns from a row, by the functions that the configuration names.

Guarantee: a source that loaded has at least one row, and a row keeps its number at every start as long as the data stay the
same. An error of `datasets` reaches the user with key and place. Any fault of a user's function is a `DatasetError` that names
the function, the row and the dataset.
"""

import hashlib
import inspect
import json
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value, load_dataset, load_from_disk

from protocol.config.data import SourceSection
from protocol.config.functions import load_function
from protocol.errors import DatasetError
from protocol.wire.messages import is_conversational, media_in

Row = dict[str, Any]
Prompt = tuple[Any, Row]
"""A string or a list of messages, and the other columns of its row."""


class Verdict(IntEnum):
    KEPT = 0
    FILTERED = 1
    TRANSFORMED_AWAY = 2
    TOO_LONG = 3
    UNUSABLE = 4


class Judged(NamedTuple):
    """The judgement of a row. `row` is the prompt encoded, where a child process made it."""

    verdict: Verdict
    prompt: Prompt | None = None
    row: bytes = b""
    problem: str = ""  # with an UNUSABLE row


class RowReader:
    """Reads the rows of one source, named `key` in the configuration file, by their numbers. Raises ConfigError if `filter` or
    `transform` cannot be imported."""

    def __init__(self, source: SourceSection, key: str, rows: Dataset) -> None:
        self.source = source
        self.key = key
        self.rows = rows
        self.filter = load_function(source.filter, f"{key}.filter") if source.filter else None
        self.transform = load_function(source.transform, f"{key}.transform") if source.transform else None

    def passes(self, row: Row, number: int) -> bool:
        """Return whether the filter lets the row through. Raises DatasetError if it raised, or returned no bool."""
        if self.filter is None:
            return True
        passes = self._call("filter", self.filter, row, number)
        if not isinstance(passes, bool | np.bool_):
            raise DatasetError(
                f"{self.key}.filter returned {passes!r:.80} for {self.place(number)}; it must return True or False"
            )
        return bool(passes)

    def read(self, row: Row, number: int) -> Prompt | None:
        """The prompt (a string or a list of messages) and all other columns; None for a row that the transform skips. Raises
        DatasetError if the transform raised, or the row has no usable prompt."""
        if self.transform is not None:
            made = self._call("transform", self.transform, row, number)
            if made is None:
                return None
            if not isinstance(made, dict) or not all(isinstance(name, str) for name in made):
                raise DatasetError(
                    f"{self.key}.transform returned {made!r:.80} for {self.place(number)}; it must return a dict or None, and "
                    "names of columns are texts"
                )
            row = dict(made)
        column = self.source.prompt_column
        self._check_column("prompt_column", row, number)
        prompt = row.pop(column)
        if not (prompt if isinstance(prompt, str) else is_conversational(prompt)):
            raise DatasetError(
                f"{self.key}: {self.place(number)}: {column!r} must be a string that is not empty, or a list of "
                f"messages with role and content, got {str(prompt)[:80]!r}"
            )
        if (kind := media_in(prompt)) is not None:
            raise DatasetError(
                f"{self.key}: {self.place(number)}: a message of {column!r} has a part of type {kind!r}; prompts are text, also "
                "those of vision-language models: take the row out with a filter, or the part with a transform"
            )
        return prompt, row

    def check_answer(self, columns: Row, number: int) -> None:
        """Raise DatasetError if a row is to have an answer and has no column for it."""
        if self.source.answer_column is not None:
            self._check_column("answer_column", columns, number)

    def _check_column(self, key: str, row: Row, number: int) -> None:
        column = getattr(self.source, key)
        if column not in row:
            raise DatasetError(
                f"{self.key}.{key}: {self.source.path} has no column {column!r}; it has "
                f"{', '.join(map(repr, row))} (row {number})"
            )

    def judge(self, row: Row, number: int) -> Judged:
        """Filter and read a row. Raises DatasetError if the filter raised, or returned no bool."""
        if not self.passes(row, number):
            return Judged(Verdict.FILTERED)
        try:
            prompt = self.read(row, number)
        except DatasetError as error:
            return Judged(Verdict.UNUSABLE, problem=str(error))
        return Judged(Verdict.TRANSFORMED_AWAY if prompt is None else Verdict.KEPT, prompt)

    def code_digest(self) -> str:
        """sha256 over the files that the functions are in, and what else decides how a row is read."""
        digest = hashlib.sha256(self.source.prompt_column.encode())
        for spec, function in ((self.source.filter, self.filter), (self.source.transform, self.transform)):
            digest.update(f"\0{spec}\0".encode())
            if function is not None:
                digest.update(_file_of(function))
        return digest.hexdigest()

    def _call(self, what: str, function: Callable[[Row], Any], row: Row, number: int) -> Any:
        try:
            return function(dict(row))
        except Exception as error:
            raise DatasetError(
                f"{self.key}.{what} raised on {self.place(number)}: {type(error).__name__}: {error}"
            ) from error

    def place(self, number: int) -> str:
        """Return row and dataset, for messages."""
        return f"row {number} of {self.source.path}"


def _file_of(function: Callable[[Row], Any]) -> bytes:
    """Read the file of a function; empty for one that is in none."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return b""
    return Path(file).read_bytes() if file and Path(file).is_file() else b""


_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_MESSAGE = {"role": Value("string"), "content": Value("string")}
_GENERATED = Features({"prompt": [_MESSAGE], "answer": Value("string"), "entry": Value("string")})
_DIGEST_ROWS = 10_000  # at a time


def load_rows(source: SourceSection, key: str) -> Dataset:
    """Read the source named `key` in the configuration file. Raises DatasetError if there is no such dataset or split, or it
    has no rows."""
    assert source.path is not None, "rows of reasoning-gym are written before"
    path = Path(source.path)
    suffix = path.suffix if path.suffix in _BUILDERS else None
    if suffix and not path.is_file():
        raise DatasetError(f"{key}.path: there is no file {path.absolute()}")
    if path.is_file() and not suffix:
        raise DatasetError(f"{key}.path: {source.path} must end in one of {', '.join(_BUILDERS)}")
    if path.is_file() and path.stat().st_size == 0:
        raise _no_rows(source, key)
    try:
        rows = _first_rows(_open(source, path), source.max_rows)
    except Exception as error:
        if "corresponds to no data" in str(error):  # what `datasets` says of a file with a header only
            raise _no_rows(source, key) from error
        reason = error.__cause__ or error
        raise DatasetError(
            f"{key}.path: {source.path} (split {source.split}) could not be loaded: {type(reason).__name__}: {reason}"
        ) from error
    if len(rows) == 0:
        raise _no_rows(source, key)
    return rows


def _open(source: SourceSection, path: Path) -> Dataset | IterableDataset:
    if source.reasoning_gym is not None:
        with path.open("rb") as stream:  # the JSON of `datasets` would make times of answers that look like some
            return Dataset.from_list([json.loads(line) for line in stream], features=_GENERATED)
    if path.suffix in _BUILDERS:
        files = {source.split.partition("[")[0]: str(path)}
        return load_dataset(_BUILDERS[path.suffix], data_files=files, split=source.split, streaming=source.streaming)
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        loaded = load_from_disk(str(path))
        return loaded if isinstance(loaded, Dataset) else loaded[source.split]
    return load_dataset(
        source.path, source.subset, split=source.split, revision=source.revision, streaming=source.streaming
    )


def _first_rows(rows: Dataset | IterableDataset, count: int | None) -> Dataset:
    if isinstance(rows, IterableDataset):
        assert count is not None, "streams are bounded"
        taken = list(rows.take(count))
        names = dict.fromkeys(name for row in taken for name in row)
        return Dataset.from_list([{name: row.get(name) for name in names} for row in taken], features=rows.features)
    return rows if count is None or count >= len(rows) else rows.select(range(count))


def rows_digest(rows: Dataset) -> str:
    """sha256 over columns, types and all values, as 64 hex digits; equal wherever the rows came from."""
    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(batch_size=_DIGEST_ROWS):
        sink = pa.BufferOutputStream()
        plain = table.replace_schema_metadata(None).combine_chunks()
        with pa.ipc.new_stream(sink, plain.schema) as stream:
            stream.write_table(plain)
        digest.update(sink.getvalue())
    return digest.hexdigest()


def _no_rows(source: SourceSection, key: str) -> DatasetError:
    return DatasetError(f"{key}.path: {source.path}, split {source.split}, has no rows")
