"""The columns of a dataset's local files, by their first rows.

Guarantee: it parses a bounded part of one file. A column that only later rows have is never called missing. What needs a library
to be read has no columns here.
"""

import csv
import gzip
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from protocol.config.places import row_file_ending

_ROWS = 100
_CHARACTERS = 2**20


def files_of(path: str) -> list[Path]:
    """Return the files that a path, or a pattern of paths, names; none if there is none."""
    try:
        return [Path(path)] if os.path.exists(path) else [Path(name) for name in sorted(glob(path))]
    except (OSError, ValueError):  # no file can have such a name
        return []


class Columns:
    """The names of columns: those of the first rows, and what the bytes of `later` files name in quotes."""

    def __init__(self, names: frozenset[str], later: Sequence[Path] = ()) -> None:
        self._names, self._later = names, later

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __contains__(self, name: object) -> bool:
        return name in self._names or any(_may_name(file, str(name)) for file in self._later)

    def without(self, name: str) -> "Columns":
        return Columns(self._names - {name}, self._later)


def columns_of(files: Sequence[Path]) -> Columns | None:
    """Return the columns of these files; None where they cannot be told, as in rows that are broken."""
    file = files[0]
    ending = row_file_ending(file.name)
    try:
        if file.is_dir():
            names = _of_saved(file)
            return Columns(names) if names else None
        if ending == ".parquet":
            from pyarrow import parquet  # a tenth of a second, for these files alone

            return Columns(frozenset(parquet.read_schema(file).names))
        if ending in (".arrow", None):
            return None
        with gzip.open(file, "rt") if file.name.endswith(".gz") else file.open(encoding="utf-8-sig") as stream:
            text = stream.read(_CHARACTERS)
        if ending in (".csv", ".tsv"):
            header = csv.reader([text.partition("\n")[0]], delimiter="\t" if ending == ".tsv" else ",")
            return Columns(frozenset(next(header, [])))
        rows = _json_rows(text)
    except (OSError, ValueError, RecursionError, csv.Error, EOFError):
        return None
    if not rows or not all(isinstance(row, dict) for row in rows):
        return None
    is_whole = len(rows) < _ROWS and len(text) < _CHARACTERS
    return Columns(frozenset(name for row in rows for name in row), files[1 if is_whole else 0 :])


def _may_name(file: Path, name: str) -> bool:
    """Return whether a file of JSON has this name in quotes somewhere. A packed one may."""
    if file.name.endswith(".gz"):
        return True
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(json.dumps(name, ensure_ascii=escapes).encode()) >= 0 for escapes in (True, False))
    except (OSError, ValueError):  # no such file any more, an empty one
        return False


def _json_rows(text: str) -> list[Any]:
    """Return the rows that are whole in the begin of a file."""
    text = text.lstrip()
    decoder, place = json.JSONDecoder(), 1 if text.startswith("[") else 0
    rows: list[Any] = []
    while len(rows) < _ROWS:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place >= len(text) or text[place] == "]":
            break
        try:
            row, place = decoder.raw_decode(text, place)
        except ValueError:
            if len(text) < _CHARACTERS:
                raise
            break
        rows.append(row)
    return rows


def _of_saved(folder: Path) -> frozenset[str]:
    """Return those of a folder of `save_to_disk`; none where it does not tell."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        folder /= next(iter(json.loads(splits.read_text(encoding="utf-8"))["splits"]), "")
    info = folder / "dataset_info.json"
    return (
        frozenset(json.loads(info.read_text(encoding="utf-8")).get("features") or ()) if info.is_file() else frozenset()
    )
