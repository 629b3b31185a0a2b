"""Opens the rows of a source: a file, files, a folder of `save_to_disk`, a folder of files, or a data set of the hub.

Guarantee: a source that opened has at least one row, and a row keeps its number at every start as long as the data stay the
same. Each kind of source takes every key of its section, or refuses it by its name. An error of `datasets` reaches the user with
key and place. A column that no message can carry is refused here, unless a transform makes the row.
"""

import os
from glob import escape, glob, has_magic
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    ReadInstruction,
    concatenate_datasets,
    load_dataset_builder,
    load_from_disk,
)
from datasets.packaged_modules.cache.cache import Cache
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json

from consumer.prompts.source_rows import Rows
from consumer.prompts.written import Written
from protocol.config.data import SourceSection
from protocol.config.places import ROW_FILES, row_file_ending
from protocol.errors import DatasetError

_STREAMED_ROWS = 1000  # at a time
_OF_HUB = ("subset", "revision")


def load_rows(source: SourceSection, key: str) -> Rows:
    """Read the source named `key` in the configuration file. Raises DatasetError if there is no such dataset or split, it has
    no rows, or one of its columns cannot be sent."""
    assert source.path is not None, "rows of reasoning-gym are written before"
    try:
        chosen = _part(_splits(source, key), source)
    except DatasetError:
        raise
    except Exception as error:
        if "corresponds to no data" in str(error):  # what `datasets` says of files without a row
            raise _no_rows(source, key) from error
        reason = error.__cause__ or error
        why = str(reason) if isinstance(reason, DatasetError) else f"{type(reason).__name__}: {reason}"
        raise DatasetError(f"{key}.path: {source.path} (split {source.split}) could not be loaded: {why}") from error
    if len(chosen) == 0:
        raise _no_rows(source, key)
    rows = Rows(chosen)
    if (source.transform is None or source.blocks is not None) and (column := rows.not_sendable()):
        name, kind = column
        raise DatasetError(
            f"{key}: the column {name!r} of {source.path} is of type {kind}, which cannot be sent to a producer; drop it, or "
            "make text of it, with `transform`"
        )
    return rows


def _splits(source: SourceSection, key: str) -> Any:
    path = Path(source.path or "")
    ending = None if path.is_dir() else row_file_ending(path.name)
    files = _matching(path) if ending and not path.exists() else [str(path)]
    is_saved = (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
    if files and Path(files[0]).exists():
        _check_place(Path(files[0]).resolve(), key, is_read_whole=path.is_dir() and not is_saved)
    if ending and not files:
        raise DatasetError(f"{key}.path: there is no file {path.absolute()}")
    if path.is_file() and not ending:
        raise DatasetError(f"{key}.path: {source.path} must end in one of {', '.join(ROW_FILES)}")
    for name in _OF_HUB[1 if path.is_dir() and not is_saved else 0 :] if ending or path.is_dir() else ():
        if getattr(source, name) is not None:
            raise DatasetError(f"{key}.{name}: {source.path} is on this machine, and has none; remove it")
    if is_saved:
        saved = load_from_disk(str(path))
        return saved if isinstance(saved, DatasetDict) else {"train": saved}
    if ending and not any(Path(file).stat().st_size for file in files):
        raise _no_rows(source, key)
    if ending:
        module = {".jsonl": "json", ".tsv": "csv"}.get(ending, ending[1:])
        options = {"sep": "\t"} if ending == ".tsv" else {}
        builder = load_dataset_builder(module, data_files={"train": [escape(file) for file in files]}, **options)
    else:
        builder = load_dataset_builder(source.path, source.subset, revision=source.revision)
    if isinstance(builder, Json | Csv):
        builder = Written.of(builder, must_travel=source.transform is None)
    elif isinstance(builder, Cache) and builder.info.builder_name in ("json", "csv"):
        raise DatasetError(
            f"{key}.path: {source.path} is not reached, and {builder.cache_dir} was read by another program, which may have "
            "changed values; let it be reached once"
        )
    if source.streaming:
        return builder.as_streaming_dataset()
    builder.download_and_prepare()
    return builder.as_dataset()


def _check_place(place: Path, key: str, *, is_read_whole: bool) -> None:
    """Refuse a path that `datasets` would take for another one."""
    name, fix = str(place), "rename it"
    if "::" in name:
        why = "takes :: for a chain of file systems"
    elif os.path.expandvars(name) != name:
        why = "puts the value of a variable in place of its name"
    elif is_read_whole and has_magic(name):
        why, fix = "takes *, ? and [ in a folder's name for a pattern", "rename it, or name the files in it"
    else:
        return
    raise DatasetError(f"{key}.path: {name}: `datasets` {why}; {fix}")


def _matching(pattern: Path) -> list[str]:
    """Return the files of a pattern. The part of it that is there is no pattern, whatever characters it has."""
    folder = next(folder for folder in pattern.parents if folder.is_dir())
    return sorted(os.path.join(folder, name) for name in glob(str(pattern.relative_to(folder)), root_dir=folder))


def _part(splits: dict[str, Any], source: SourceSection) -> Dataset:
    """Return the rows that `split` and `max_rows` name."""
    count = source.max_rows
    first = next(iter(splits.values()))
    if isinstance(first, IterableDataset):
        if source.split not in splits:
            raise ValueError(
                f"a stream has the splits {', '.join(splits)} and no parts of one; take the first rows by max_rows, or read "
                "it without `streaming`"
            )
        tables = list(splits[source.split].take(count).with_format("arrow").iter(_STREAMED_ROWS))
        return Dataset(pa.concat_tables(tables)) if tables else Dataset.from_list([])
    lengths = {str(name): len(rows) for name, rows in splits.items()}
    parts = ReadInstruction.from_spec(source.split).to_absolute(lengths)
    rows = concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])
    return rows if count is None or count >= len(rows) else rows.select(range(count))


def _no_rows(source: SourceSection, key: str) -> DatasetError:
    return DatasetError(f"{key}.path: {source.path}, split {source.split}, has no rows")
