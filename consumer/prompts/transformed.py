"""Prompts whose rows a user's function transforms, for the intake's thread, which must not wait for it.

Guarantee: whatever the function does, whoever asks for a prompt has an answer at once: the prompt, what is wrong with it, or that
it is being read. Rows are read one after the other, in the order in which they are asked for, in a process of its own: a function
that hangs, in a regular expression too, holds up neither the trainer's threads nor its end. The log says for which row prompts
wait; one that takes `LIMIT_S` is refused alone, as is one in which the process ends.
"""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe

import msgspec

from consumer.prompts.dataset import PromptDataset
from consumer.prompts.placeholders import Placeholders
from consumer.prompts.source import Prompt, PromptSource
from consumer.prompts.transform_worker import Job, Made, packed
from protocol.errors import DatasetError

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
_START_LIMIT_S = 300.0  # of the process, which imports `datasets` and the user's module
_SAY_EVERY_S = 10.0
_MAX_ANSWER_BYTES = 64 * 2**20


class _EndedError(Exception):
    """The worker gave no answer. The text says why."""


class _Worker:
    """The process; belongs to one thread, but for `kill`."""

    def __init__(self, sources: bytes) -> None:
        self._pipe, theirs = Pipe()
        arguments = [str(theirs.fileno()), str(os.getpid()), sources.decode()]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "consumer.prompts.transform_worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def send(self, job: Job) -> None:
        with contextlib.suppress(OSError):  # it has ended, which receiving says
            self._pipe.send_bytes(msgspec.msgpack.encode(job))

    def receive(self, timeout_s: float) -> bytes | None:
        """None: it has not answered within the time.

        Raises:
            _EndedError: it never will.
        """
        try:
            return self._pipe.recv_bytes(_MAX_ANSWER_BYTES) if self._pipe.poll(timeout_s) else None
        except (EOFError, OSError):  # the second for an answer that is too large, too
            raise _EndedError("the process that it ran in ended, or answered with more than 64 MiB") from None

    def kill(self) -> None:
        """With what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._pipe.close()


class TransformedPrompts:
    """See the module's guarantee. Close it in the end.

    Args:
        wake: called by another thread when a prompt has been read.
        limit_s: for one row.
    """

    def __init__(self, prompts: PromptDataset, wake: Callable[[], None], limit_s: float = LIMIT_S) -> None:
        self._prompts = prompts
        self._wake = wake
        self._limit_s = limit_s
        readers = prompts.readers
        self._tables = [reader.rows.with_format("arrow") for reader in readers]
        self._sources = msgspec.json.encode([(reader.key, reader.source.model_dump(mode="json")) for reader in readers])
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._found: dict[int, Prompt | DatasetError | None] = {}  # None: it is being read
        self._worker: _Worker | None = None
        self._closing = False
        self._starting = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prompts", daemon=True)
        self._thread.start()

    def __getitem__(self, prompt_id: int) -> Prompt | None:
        """As `PromptSource`. What was read is handed out once."""
        if self._error is not None:
            raise self._error
        if prompt_id not in self._found:
            self._found[prompt_id] = None
            self._asked.put(prompt_id)
        found = self._found[prompt_id]
        if found is not None:
            del self._found[prompt_id]
        if isinstance(found, DatasetError):
            raise found
        return found

    def close(self) -> None:
        with self._starting:
            self._closing = True
            if self._worker is not None:
                self._worker.kill()
        self._asked.put(None)
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            while (prompt_id := self._asked.get()) is not None and not self._closing:
                self._found[prompt_id] = self._read(prompt_id)
                self._wake()
        except BaseException as error:
            self._error = error
            self._wake()
        finally:
            self._end_worker()

    def _read(self, prompt_id: int) -> Prompt | DatasetError:
        source, number = self._prompts.locate(prompt_id)
        reader = self._prompts.readers[source]
        try:
            if not reader.has_transform:
                return reader[number]
            answer = self._ask(Job(source, number, packed(self._tables[source], number)), prompt_id)
            made = msgspec.msgpack.decode(answer, type=Made)
        except DatasetError as error:
            return error
        except (_EndedError, msgspec.DecodeError) as error:
            self._end_worker()
            return DatasetError(f"{reader.key}.transform gave nothing for {reader.place(number)}: {error}")
        return DatasetError(made.problem) if made.problem else (made.prompt, made.columns)

    def _ask(self, job: Job, prompt_id: int) -> bytes:
        worker = self._worker
        if worker is None:
            with self._starting:
                if self._closing:
                    raise _EndedError("the trainer stops")
                worker = self._worker = _Worker(self._sources)
            self._receive(worker, prompt_id, _START_LIMIT_S)  # that it has started
        worker.send(job)
        return self._receive(worker, prompt_id, self._limit_s)

    def _receive(self, worker: _Worker, prompt_id: int, limit_s: float) -> bytes:
        began = time.monotonic()
        while (answer := worker.receive(min(_SAY_EVERY_S, limit_s))) is None:
            waited_s = time.monotonic() - began
            if waited_s >= limit_s:
                raise _EndedError(f"it had not returned after {limit_s:g} s")
            place = self._prompts.place(prompt_id)
            logger.warning("prompts wait for the transform, at work on %s for %.0f s", place, waited_s)
        return answer

    def _end_worker(self) -> None:
        with self._starting:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


@contextlib.contextmanager
def read_aside(prompts: PromptDataset | Placeholders, wake: Callable[[], None]) -> Iterator[PromptSource]:
    """The prompts for a thread that must not wait for user code. Without a transform nothing of the user's runs.

    Args:
        wake: as of `TransformedPrompts`.
    """
    if isinstance(prompts, Placeholders) or not any(reader.has_transform for reader in prompts.readers):
        yield prompts
        return
    with contextlib.closing(TransformedPrompts(prompts, wake)) as transformed:
        yield transformed
