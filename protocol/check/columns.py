"""The columns of a dataset's local files, by their first rows.

Guarantee: it reads a bounded part of one file. What needs a library to be read has no columns here.
"""

import csv
import gzip
import json
import os
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


def columns_of(file: Path) -> frozenset[str] | None:
    """Return the names of all columns in the first rows; None where they cannot be told. Mistakes within the rows are left to who
    reads them all."""
    try:
        if file.is_dir():
            return _of_saved(file)
        ending = row_file_ending(file.name)
        if ending in (".parquet", ".arrow", None):
            return None
        with gzip.open(file, "rt") if file.name.endswith(".gz") else file.open(encoding="utf-8-sig") as stream:
            text = stream.read(_CHARACTERS)
        if ending in (".csv", ".tsv"):
            return frozenset(
                next(csv.reader([text.partition("\n")[0]], delimiter="\t" if ending == ".tsv" else ","), [])
            )
        rows = _json_rows(text)
    except (OSError, ValueError, RecursionError, csv.Error, EOFError):
        return None
    return (
        frozenset(name for row in rows for name in row) if rows and all(isinstance(row, dict) for row in rows) else None
    )


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


def _of_saved(folder: Path) -> frozenset[str] | None:
    """Return those of a folder of `save_to_disk`."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        folder /= next(iter(json.loads(splits.read_text(encoding="utf-8"))["splits"]), "")
    info = folder / "dataset_info.json"
    return (
        frozenset(json.loads(info.read_text(encoding="utf-8")).get("features") or ()) or None
        if info.is_file()
        else None
    )
