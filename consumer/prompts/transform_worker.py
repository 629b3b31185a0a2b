"""Transforms rows in a process of its own, for `consumer.prompts.transformed`:
`python -m consumer.prompts.transform_worker FD PARENT_PID SOURCES`.

Guarantee: a row comes out as it would in the trainer, as a prompt with its columns or as what is wrong with it; what the user's
function prints goes to standard error and never into an answer. The process dies with the trainer.
"""

import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pyarrow as pa
from datasets import Dataset

from consumer.prompts.rows import RowReader
from protocol.config.dataset import SourceSection
from protocol.errors import DatasetError
from protocol.processes.lifeline import die_with_parent


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


def main(descriptor: int, parent_pid: int, sources: bytes) -> None:
    die_with_parent(parent_pid)
    nothing = Dataset.from_list([])
    readers = [
        RowReader(SourceSection.model_validate(section), key, nothing)
        for key, section in msgspec.json.decode(sources, type=list[tuple[str, dict[str, Any]]])
    ]
    with Connection(descriptor) as trainer:
        trainer.send_bytes(b"ready")
        while True:
            try:
                job = msgspec.msgpack.decode(trainer.recv_bytes(), type=Job)
            except EOFError:
                return
            trainer.send_bytes(made(readers, job))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode())
