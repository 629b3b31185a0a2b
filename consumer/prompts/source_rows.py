"""The rows of a source as plain values, whatever it keeps them in.

Guarantee: a row has every column of its source, and None where it has no value. Values are texts, numbers, booleans, None, lists
and dicts of these, and bytes where a transform may see them. What Arrow has other types for becomes the text that
`docs/tutorial.md` names: 2031-01-05 of a date, 12.50 of a decimal.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features
from pyarrow import types

from consumer.prompts.written import FEATURES, NAMES, ROW, Row, columns

_DIGEST_ROWS = 10_000  # at a time
_BYTES = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
_PLAIN = (
    types.is_null, types.is_boolean, types.is_integer, types.is_string, types.is_large_string, types.is_string_view, *_BYTES
)  # fmt: skip
_LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)


class Rows:
    """The rows of `dataset`, by their numbers."""

    def __init__(self, dataset: Dataset) -> None:
        self._tables = dataset.with_format("arrow")
        self._is_written = dataset.column_names == list(FEATURES)
        self.names = dataset.column_names
        if self._is_written:
            different = pc.unique(self._tables[:][NAMES]).to_pylist() if len(dataset) else []
            self.names = list(dict.fromkeys(name for names in different for name in json.loads(names)))

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, number: int) -> Row:
        table = self._tables[number]
        if self._is_written:
            kept: Row = json.loads(table[ROW][0].as_py())
            return dict.fromkeys(self.names) | kept
        return {name: plain(table[name][0].as_py(), table[name].type) for name in table.column_names}

    @property
    def digest(self) -> str:
        """sha256 over columns, types and all values, as 64 hex digits; equal wherever the rows came from."""
        digest = hashlib.sha256()
        for table in self._tables.iter(batch_size=_DIGEST_ROWS):
            sink = pa.BufferOutputStream()
            bare = table.replace_schema_metadata(None).combine_chunks()
            with pa.ipc.new_stream(sink, bare.schema) as stream:
                stream.write_table(bare)
            digest.update(sink.getvalue())
        return digest.hexdigest()

    def not_sendable(self) -> tuple[str, str] | None:
        """Return the name and the type of the first column that no message can carry."""
        if self._is_written:  # each row was looked at when it was read
            return None
        schema = self._tables.data.schema
        return next(((field.name, str(field.type)) for field in schema if not _is_sendable(field.type)), None)

    def map(self, make: Callable[[int], dict[str, Any]], features: Features, file: str, key: str) -> Dataset:
        """Return what `make` returns for each row's number, once for its key in the cache of `datasets`, which is `file`."""
        numbers = Dataset.from_dict({"number": range(len(self))})
        return numbers.map(
            make,
            input_columns="number",
            remove_columns="number",
            features=features,
            cache_file_name=file,
            new_fingerprint=key,
        )

    def expanded(self, make: Callable[[Row], list[Row]], file: str, key: str) -> "Rows":
        """Return the rows that `make` returns for each row, kept as `map` does."""
        numbers = Dataset.from_dict({"number": range(len(self))})
        made = numbers.map(
            lambda batch: columns([row for number in batch for row in make(self[number])]),
            input_columns="number",
            remove_columns="number",
            batched=True,
            batch_size=100,
            features=FEATURES,
            cache_file_name=file,
            new_fingerprint=key,
        )
        return Rows(made)


def _is_sendable(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.JsonType):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _is_sendable(kind.storage_type)
    if types.is_struct(kind):
        return all(_is_sendable(field.type) for field in kind)
    if _is_any(kind, _LISTS) or types.is_dictionary(kind):
        return _is_sendable(kind.value_type)
    is_number_or_time = types.is_floating(kind) or types.is_decimal(kind) or types.is_temporal(kind)
    return (is_number_or_time and not types.is_interval(kind)) or (_is_any(kind, _PLAIN) and not _is_any(kind, _BYTES))


def _is_any(kind: pa.DataType, tests: tuple[Callable[[pa.DataType], bool], ...]) -> bool:
    return any(test(kind) for test in tests)


def plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value of an Arrow type as what a row has of it."""
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(kind, pa.BaseExtensionType):
        return plain(value, kind.storage_type)
    if types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if types.is_dictionary(kind):
        return plain(value, kind.value_type)
    if _is_any(kind, _LISTS):
        return [plain(item, kind.value_type) for item in value]
    if types.is_float16(kind) or types.is_float32(kind):
        return float(str(kind.to_pandas_dtype()(value)))  # 0.1, and not the double that is nearest to its few bits
    if types.is_decimal(kind):
        return format(value, "f")
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return value.isoformat()
    return str(value) if types.is_temporal(kind) else value
