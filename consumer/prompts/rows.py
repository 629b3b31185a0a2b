"""Makes a prompt with its columns from a row, by the functions that the configuration names.

Guarantee: any fault of a user's function is a `DatasetError` that names the function, the row and the dataset.
"""

import hashlib
import inspect
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from consumer.prompts.source_rows import Rows
from consumer.prompts.written import Row
from protocol.config.data import SourceSection
from protocol.config.functions import load_function
from protocol.errors import DatasetError
from protocol.wire.messages import is_conversational, media_in

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

    def __init__(self, source: SourceSection, key: str, rows: Rows) -> None:
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

    def judge(self, number: int, row: Row | None = None) -> Judged:
        """Filter and read a row, which may be given. Raises DatasetError if the filter raised, or returned no bool."""
        row = self.rows[number] if row is None else row
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
