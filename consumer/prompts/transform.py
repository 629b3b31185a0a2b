"""A user's filter and transform in a process of their own: `python -m consumer.prompts.transform FD SOURCE`.

Guarantee: nothing that the functions do ends the trainer or holds up its end. A row on which they take `LIMIT_S`, or end their
process, is refused alone, with function and row in its error. The log names the row that the start waits for, and has the
functions' output.
"""

import asyncio
import json
import logging
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from datasets import Dataset

from consumer.prompts.rows import Judged, RowReader, Verdict
from consumer.prompts.source_rows import Rows
from consumer.prompts.written import Row, as_leased
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
_BYTES = "bytes in base64"  # the only key of what stands for bytes


class Job(msgspec.Struct, frozen=True):
    """A row to judge: its number, and packed."""

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
        self._source = msgspec.json.encode((reader.key, reader.source.model_dump(mode="json"))).decode()
        self._loop = asyncio.new_event_loop()
        self._children = ChildProcesses(Throttle(logger))
        self._child: ChildProcess | None = None
        self.num_ended = 0

    def judge(self, number: int) -> Judged:
        """Judge as `RowReader.judge` does."""
        answer = self._loop.run_until_complete(self._ask(Job(number, packed(self._reader.rows[number]))))
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


def packed(row: Row) -> bytes:
    """Pack a row: as JSON, which has integers of any size, with bytes in base64."""
    return json.dumps(row, default=lambda value: {_BYTES: b64encode(value).decode()}).encode()


def unpacked(row: bytes) -> Row:
    made: Row = json.loads(
        row, object_hook=lambda value: b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value
    )
    return made


def answer(reader: RowReader, job: Job) -> Answer:
    """Judge a row in the child."""
    try:
        judged = reader.judge(job.number, unpacked(job.row))
    except DatasetError as error:
        return Answer(filter_error=str(error))
    if judged.prompt is None:
        return Answer(judged.verdict, problem=judged.problem)
    prompt, columns = judged.prompt
    try:
        place = f"{reader.key}.transform: {reader.place(job.number)}"
        as_leased({reader.source.prompt_column: prompt} | columns, place)
    except DatasetError as error:
        return Answer(Verdict.UNUSABLE, problem=str(error))
    return Answer(judged.verdict, msgspec.msgpack.encode(judged.prompt))


def main(descriptor: int, source: str) -> None:
    channel = WorkerChannel(descriptor)
    key, section = msgspec.json.decode(source, type=tuple[str, dict[str, Any]])
    reader = RowReader(SourceSection.model_construct(**section), key, Rows(Dataset.from_list([])))
    channel.send(Answer())
    while (frame := channel.receive()) is not None:
        channel.send(answer(reader, msgspec.msgpack.decode(frame, type=Job)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
