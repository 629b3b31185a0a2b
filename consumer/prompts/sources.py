"""The rows of one source, as `datasets` reads them.

Guarantee: a source that loaded has at least one row, and a row keeps its number at every start as long as the data stay the
same. Whatever `datasets` says of a source that it cannot load reaches the user with the key and the place.
"""

import hashlib
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, IterableDataset, load_dataset, load_from_disk

from protocol.config.data import SourceSection
from protocol.errors import DatasetError

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_DIGEST_ROWS = 10_000  # at a time


def load_rows(source: SourceSection, key: str) -> Dataset:
    """Reads the source named `key` in the configuration file. Raises DatasetError if there is no such dataset or split, or it
    has no rows."""
    path = Path(source.path)
    suffix = path.suffix if path.suffix in _BUILDERS else None
    if suffix and not path.is_file():
        raise DatasetError(f"{key}.path: there is no file {source.path} (looked from {Path.cwd()})")
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
    if path.suffix in _BUILDERS:
        files = {source.split.partition("[")[0]: str(path)}
        return load_dataset(_BUILDERS[path.suffix], data_files=files, split=source.split, streaming=source.streaming)
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        loaded = load_from_disk(str(path))
        return loaded if isinstance(loaded, Dataset) else loaded[source.split]
    return load_dataset(
        source.path, source.name, split=source.split, revision=source.revision, streaming=source.streaming
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
