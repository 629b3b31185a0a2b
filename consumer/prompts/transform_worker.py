"""Transforms rows in a process of its own, for `consumer.prompts.transformed`:
`python -m consumer.prompts.transform_worker FD SOURCES`.

Guarantee: a row comes out as it would in the trainer, as a prompt with its columns or as what is wrong with it; what the user's
function prints goes to the log and never into an answer.
"""

import sys
from typing import Any

import msgspec
import pyarrow as pa
from datasets import Dataset

from consumer.prompts.rows import RowReader
from protocol.config.data import SourceSection
from protocol.errors import DatasetError
from protocol.runtime.worker_channel import WorkerChannel


class Job(msgspec.Struct, frozen=True):
    """A row to transform: its number among those of a source, and what is in it, as an Arrow stream of one row."""

    source: int
    number: int
    row: bytes


class Made(msgspec.Struct, frozen=True):
    """The prompt and its columns, or the problem with the row."""

    prompt: Any = None
    columns: dict[str, Any] = {}
    problem: str = ""


def packed(rows: Dataset, number: int) -> bytes:
    """One of the rows, which in Arrow's format must be; the types of its columns go with it."""
    table = rows[number]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def unpacked(row: bytes) -> dict[str, Any]:
    with pa.ipc.open_stream(row) as stream:
        return dict(Dataset(stream.read_all())[0])


def made(readers: list[RowReader], job: Job) -> bytes:
    """The answer, encoded."""
    reader = readers[job.source]
    try:
        prompt, columns = reader.read_kept(unpacked(job.row), job.number)
        return msgspec.msgpack.encode(Made(prompt, columns))
    except DatasetError as error:
        return msgspec.msgpack.encode(Made(problem=str(error)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"{reader.key}.transform: {reader.place(job.number)} cannot be sent: {error}"
        return msgspec.msgpack.encode(Made(problem=problem))


def main(descriptor: int, sources: str) -> None:
    channel = WorkerChannel(descriptor)
    nothing = Dataset.from_list([])
    readers = [
        RowReader(SourceSection.model_validate(section), key, nothing)
        for key, section in msgspec.json.decode(sources, type=list[tuple[str, dict[str, Any]]])
    ]
    channel.send(Made())
    while (frame := channel.receive()) is not None:
        channel.send(msgspec.Raw(made(readers, msgspec.msgpack.decode(frame, type=Job))))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
