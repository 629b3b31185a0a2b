"""A user's filter and transform in a process of their own: `python -m consumer.prompts.transform FD SOURCE`.

Guarantee: nothing that the functions do ends the trainer or holds up its end. A row on which they take `LIMIT_S`, or end their
process, is refused alone, with function and row in its error. The log names the row that the start waits for, and has the
functions' output.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pyarrow as pa
from datasets import Dataset

from consumer.prompts.rows import Judged, Row, RowReader, Verdict
from protocol.config.data import SourceSection
from protocol.errors import DatasetError
from protocol.runtime.child import ChildEndedError, ChildProcess, ChildProcesses
from protocol.runtime.logs import Throttle
from protocol.runtime.worker_channel import WorkerChannel

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
_START_LIMIT_S = 300.0  # of the process, which imports `datasets` and the user's module
_SAY_EVERY_S = 10.0
_POLL_S = 0.25


class Job(msgspec.Struct, frozen=True):
    """A row to judge: its number, and an Arrow stream of this one row."""

    number: int
    row: bytes


class Answer(msgspec.Struct, frozen=True):
    """The judgement of a row, or the error of the filter, which ends the start."""

    verdict: int = 0
    row: bytes = b""
    problem: str = ""
    filter_error: str = ""


class TransformProcess:
    """A child process that judges the rows of `reader` as the reader does. `check` is called while it waits, and may raise;
    `limit_s` is for one row. Close it in the end.

    Attributes:
        num_ended: rows on which the process ended or took too long.
    """

    def __init__(self, reader: RowReader, check: Callable[[], None] = lambda: None, limit_s: float = LIMIT_S) -> None:
        self._reader = reader
        self._check = check
        self._limit_s = limit_s
        self._rows = reader.rows.with_format("arrow")
        self._source = msgspec.json.encode((reader.key, reader.source.model_dump(mode="json"))).decode()
        self._loop = asyncio.new_event_loop()
        self._children = ChildProcesses(Throttle(logger))
        self._child: ChildProcess | None = None
        self.num_ended = 0

    def judge(self, row: Row, number: int) -> Judged:
        """Judge as `RowReader.judge` does; the child gets the row in Arrow's format, with the types of its columns."""
        answer = self._loop.run_until_complete(self._ask(Job(number, packed(self._rows, number))))
        if answer.filter_error:
            raise DatasetError(answer.filter_error)
        return Judged(Verdict(answer.verdict), row=answer.row, problem=answer.problem)

    def close(self) -> None:
        self._loop.run_until_complete(self._children.close())
        self._loop.close()

    async def _ask(self, job: Job) -> Answer:
        place, limit_s = self._reader.place(job.number), _START_LIMIT_S
        try:
            if self._child is None:
                self._child = self._children.start(__name__, self._source, source=f"{self._reader.key}.transform")
                await self._within(limit_s, self._child.receive(Answer), place)  # that it has started
            limit_s = self._limit_s
            return await self._within(limit_s, self._child.ask(job, Answer), place)
        except (TimeoutError, ChildEndedError) as error:
            self.num_ended += 1
            why = f"it had not returned after {limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
            if self._child is not None:
                self._children.terminate(self._child)
                self._child = None
            return Answer(Verdict.UNUSABLE, problem=f"{self._reader.key}.transform gave nothing for {place}: {why}")

    async def _within(self, limit_s: float, coming: Coroutine[Any, Any, Answer], place: str) -> Answer:
        task, began = asyncio.ensure_future(coming), time.monotonic()
        said = began
        try:
            while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
                self._check()
                now = time.monotonic()
                if now - began > limit_s:
                    raise TimeoutError
                if now - said > _SAY_EVERY_S:
                    said = now
                    text = "the start waits for %s.transform on %s for %.0f s"
                    logger.warning(text, self._reader.key, place, now - began)
            return task.result()
        finally:
            task.cancel()


def packed(rows: Dataset, number: int) -> bytes:
    """Pack one of the rows, which have Arrow's format."""
    table = rows[number]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def unpacked(row: bytes) -> Row:
    with pa.ipc.open_stream(row) as stream:
        return dict(Dataset(stream.read_all())[0])


def answer(reader: RowReader, job: Job) -> Answer:
    """Judge a row in the child."""
    try:
        judged = reader.judge(unpacked(job.row), job.number)
        row = b"" if judged.prompt is None else msgspec.msgpack.encode(judged.prompt)
        return Answer(judged.verdict, row, judged.problem)
    except DatasetError as error:
        return Answer(filter_error=str(error))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"{reader.key}.transform: {reader.place(job.number)} cannot be sent: {error}"
        return Answer(Verdict.UNUSABLE, problem=problem)


def main(descriptor: int, source: str) -> None:
    channel = WorkerChannel(descriptor)
    key, section = msgspec.json.decode(source, type=tuple[str, dict[str, Any]])
    reader = RowReader(SourceSection.model_construct(**section), key, Dataset.from_list([]))
    channel.send(Answer())
    while (frame := channel.receive()) is not None:
        channel.send(answer(reader, msgspec.msgpack.decode(frame, type=Job)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
