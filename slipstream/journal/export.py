"""`slipstream journal export` writes groups as JSON lines or as a Parquet table, one row per group.

Guarantee: the file appears under its name when it is complete, or not at all. Memory is bounded by one Parquet row group.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from protocol.errors import JournalError
from protocol.runtime.files import staged
from protocol.runtime.json_lines import encode_line
from replay.journal.reader import JournalReader
from replay.journal.schema import GroupFilter, GroupRow
from slipstream.journal.content import Content, ContentReader
from slipstream.journal.views import as_dict
from slipstream.run_reader import is_name_of_a_run
from slipstream.tables import plain, with_progress, write_line

if TYPE_CHECKING:
    import pyarrow as pa

_ROW_GROUP_ROWS = 1000
_ROW_GROUP_BYTES = 64 * 2**20


def export(reader: JournalReader, wanted: GroupFilter, newest: int, to: Path) -> None:
    """Write the newest `newest` groups, or (0) all; `JournalError` if one is damaged, or `to` cannot be written, or is a
    file that the run itself writes."""
    if is_name_of_a_run(to.name) and to.resolve().parent == reader.path.resolve().parent:
        raise JournalError(f"--to {to}: the run itself writes a file of this name; choose another name")
    bodies, total = ContentReader(reader), reader.count(wanted)
    rows = with_progress(reader.rows(wanted, newest), min(total, newest or total))
    records = (_record(row, content) for row in rows if (content := bodies.read(row)) is not None)
    write: Callable[[Iterator[dict[str, Any]], Path], int] = _parquet if to.suffix == ".parquet" else _jsonl
    try:
        with staged(to) as partial:
            count = write(records, partial)
    except OSError as error:
        raise JournalError(f"--to {to}: cannot be written: {error.strerror or error}; choose another place") from error
    write_line(f"{count} groups in {to}")


def _record(row: GroupRow, content: Content) -> dict[str, Any]:
    group = content.group
    ends = np.cumsum(group.completion_lengths)[:-1]
    return (
        as_dict(row)
        | {
            "generation_s": content.message.generation_s,
            "reward_s": content.message.reward_s,
            "prompt_ids": group.prompt_ids.tolist(),
            "completion_ids": [part.tolist() for part in np.split(group.completion_ids, ends)],
            "logprobs": [plain(part.tolist()) for part in np.split(group.logprobs, ends)],
            "token_versions": [part.tolist() for part in np.split(group.versions, ends)],
            "truncated": group.truncated.tolist(),
            "sampled": [part.tolist() for part in np.split(group.is_sampled, ends)],
            "episodes": group.completion_of.tolist(),
            "reward_names": content.reward_names,
            "rewards": plain(group.rewards.tolist()),
        }
        | {
            name: None
            if (values := getattr(group, name)) is None
            else [part.tolist() for part in np.split(values, ends)]
            for name in ("credit", "span_ends", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
        }
    )


def _jsonl(records: Iterator[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(encode_line(record) + "\n")
            count += 1
    return count


def _parquet(records: Iterator[dict[str, Any]], path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    count = waiting_bytes = 0
    waiting: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, schema) as writer:
        for record in records:
            waiting.append(record)
            waiting_bytes += record["num_bytes"]
            count += 1
            if len(waiting) == _ROW_GROUP_ROWS or waiting_bytes >= _ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(waiting, schema))
                waiting, waiting_bytes = [], 0
        if waiting:
            writer.write_table(pa.Table.from_pylist(waiting, schema))
    return count


def _schema() -> "pa.Schema":
    """The columns of a row have the types of its fields, and those of a body have the types of its arrays.

    They are not inferred from the first rows, because in all of these a step, a reward or a reason may be None.
    """
    import pyarrow as pa

    text, kinds = pa.string(), {int: pa.int64(), float: pa.float64()}
    columns = [
        (field.name, next((kinds[kind] for kind in (field.type, *get_args(field.type)) if kind in kinds), text))
        for field in fields(GroupRow)
        if field.name != "crc"
    ]
    whole, real, truth = (pa.list_(kind) for kind in (pa.int32(), pa.float32(), pa.bool_()))
    columns += [("generation_s", pa.float64()), ("reward_s", pa.float64()), ("prompt_ids", whole)]
    columns += [("completion_ids", pa.list_(whole)), ("logprobs", pa.list_(real)), ("token_versions", pa.list_(whole))]
    columns += [("truncated", truth), ("sampled", pa.list_(truth)), ("episodes", whole)]
    columns += [("reward_names", pa.list_(text)), ("rewards", pa.list_(real))]
    columns += [("credit", pa.list_(real)), ("span_ends", pa.list_(truth)), ("teacher_logprobs", pa.list_(real))]
    columns += [("teacher_top_ids", pa.list_(pa.list_(whole))), ("teacher_top_logprobs", pa.list_(pa.list_(real)))]
    return pa.schema(columns)
