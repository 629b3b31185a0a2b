"""Rows of JSON and CSV files as the files have them, for `datasets`.

Guarantee: a value is what the file says. A text stays this text whatever it looks like, a cell of a CSV file is a text, and an
empty one is the empty text. No value is changed by those of other rows. A row that cannot be read is a `DatasetError` with its
file and line.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from datasets import ArrowBasedBuilder, DatasetBuilder, DatasetInfo, Features, SplitGenerator, Value
from datasets.builder import Key
from datasets.packaged_modules.csv.csv import CsvConfig

from protocol.errors import DatasetError
from protocol.wire.codec import CodecError, carried

Row = dict[str, Any]

NAMES, ROW = "slipstream_names", "slipstream_row"
"""The columns of rows that are kept as JSON: the names of a row's columns, and the row."""

FEATURES = Features({NAMES: Value("string"), ROW: Value("large_string")})
_BATCH = 1000


class Written(ArrowBasedBuilder):  # type: ignore[misc]
    """Reads the files of a builder of `datasets` for JSON or CSV, in its place. With `must_travel`, a value that no message can
    carry is refused."""

    @classmethod
    def of(cls, builder: DatasetBuilder, *, must_travel: bool) -> "Written":
        code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
        made = cls(
            dataset_name=builder.dataset_name,
            config_name=builder.config.name,
            config_id=builder.config_id,  # it changes with the files
            hash=f"{builder.hash}-{code}-{must_travel:d}",
            base_path=builder.base_path,
            repo_id=builder.repo_id,
            token=builder.token,
            data_files=builder.config.data_files,
        )
        made.original, made.must_travel = builder.config, must_travel
        return made

    original: Any
    must_travel: bool

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=FEATURES)

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        dl_manager.download_config.extract_on_the_fly = True
        given = self.config.data_files
        extracted = dl_manager.extract(dl_manager.download(given))
        return [
            SplitGenerator(
                name=split,
                gen_kwargs={"files": [list(dl_manager.iter_files(file)) for file in files], "shown": given[split]},
            )
            for split, files in extracted.items()
        ]

    def _generate_shards(self, files: list[list[str]], shown: list[str]) -> Iterator[list[str]]:
        yield from files

    def _generate_tables(self, files: list[list[str]], shown: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        for number, (parts, name) in enumerate(zip(files, shown, strict=True)):
            rows = (row for part in parts for row in self._rows(part, str(name)))
            for batch, table in enumerate(tables(rows, must_travel=self.must_travel)):
                yield Key(number, batch), table

    def _rows(self, file: str, shown: str) -> Iterator[tuple[str, Row]]:
        options = self.original
        if isinstance(options, CsvConfig):
            yield from _of_csv(pd.read_csv, file, shown, options.pd_read_csv_kwargs)
            return
        encoding = "utf-8-sig" if options.encoding == "utf-8" else options.encoding
        with open(file, encoding=encoding, errors=options.encoding_errors, newline="\n") as stream:
            yield from of_json(stream, shown, options.field)


def of_json(stream: Any, file: str, field: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yield place and row of each line that is not empty, or of each entry of one array, which may stand in a `field`."""
    lines = ((number, line) for number, line in enumerate(stream, 1) if line.strip())
    number, first = next(lines, (0, ""))
    if field is not None or first.lstrip().startswith("["):
        whole = _decoded(first + stream.read(), file)
        entries = whole if field is None else isinstance(whole, dict) and whole.get(field)
        if not isinstance(entries, list):
            raise DatasetError(f"{file}: there is no array {field!r}")
        placed = ((f"{file}, entry {number}", entry) for number, entry in enumerate(entries))
    else:
        begun = chain([(number, first)] if number else (), lines)
        placed = ((place := f"{file}, line {number}", _decoded(line, place)) for number, line in begun)
    for place, row in placed:
        if not isinstance(row, dict):
            raise DatasetError(f"{place}: expected an object, got {row!r:.80}")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"{place}: a text is no Unicode: {error}") from None
        yield place, row


def _decoded(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f'{place}: {error}; expected an object such as {{"prompt": "..."}} on each line, or an array of objects'
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return row


def _of_csv(read: Callable[..., Any], file: str, shown: str, options: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    as_text = {"dtype": object, "keep_default_na": False, "na_filter": False, "iterator": True}
    with read(file, **options | as_text) as frames:
        for frame in frames:
            if not isinstance(frame.index, pd.RangeIndex):
                raise DatasetError(f"{shown}: a line has more cells than there are names of columns in the first")
            names = list(map(str, frame.columns))
            for number, cells in zip(frame.index, frame.itertuples(index=False, name=None), strict=True):
                yield f"{shown}, row {number}", dict(zip(names, cells, strict=True))


def tables(rows: Iterable[tuple[str, Row]], *, must_travel: bool = False) -> Iterator[pa.Table]:
    """Yield rows, given with their places, as tables of JSON."""
    numbered = iter(rows)
    while batch := list(islice(numbered, _BATCH)):
        if must_travel:
            for place, row in batch:
                as_leased(row, place)
        yield pa.table(columns([row for _, row in batch]), schema=FEATURES.arrow_schema)


def columns(rows: list[Row]) -> dict[str, list[str]]:
    """Return rows as columns of JSON."""
    return {NAMES: [json.dumps(list(row)) for row in rows], ROW: [json.dumps(row, ensure_ascii=False) for row in rows]}


def as_leased(row: Row, place: str) -> Row:
    """Return the row as a producer gets it. Raise DatasetError with the name of a value that no message can carry."""
    made: Row = {}
    for name, value in row.items():
        try:
            made[name] = carried(value)
        except CodecError as error:
            raise DatasetError(
                f"{place}: the value of {name!r} cannot be sent to a producer: {error}; make a text of it, or drop it (a "
                "`transform` can)"
            ) from None
    return made
