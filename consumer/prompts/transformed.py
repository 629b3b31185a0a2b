"""Prompts whose rows a user's function transforms, for the intake's thread, which must not wait for it.

Guarantee: whatever the function does, whoever asks for a prompt has an answer at once: the prompt, what is wrong with it, or that
it is being read. Rows are read one after the other, in the order in which they are asked for, in a process of its own: a function
that hangs, in a regular expression too, holds up neither the trainer's threads nor its end. The log says for which row prompts
wait; one that takes `LIMIT_S` is refused alone, as is one in which the process ends.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import msgspec

from consumer.prompts.dataset import Placeholders, PromptDataset
from consumer.prompts.source import Prompt, PromptSource
from consumer.prompts.transform_worker import Job, Made, packed
from protocol.errors import DatasetError
from protocol.runtime.child import ChildEndedError, ChildProcess, ChildProcesses
from protocol.runtime.logs import Throttle

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
_START_LIMIT_S = 300.0  # of the process, which imports `datasets` and the user's module
_SAY_EVERY_S = 10.0


class TransformedPrompts:
    """See the module's guarantee. Close it in the end. Another thread calls `wake` when a prompt has been read; `limit_s` is
    for one row."""

    def __init__(self, prompts: PromptDataset, wake: Callable[[], None], limit_s: float = LIMIT_S) -> None:
        self._prompts = prompts
        self._wake = wake
        self._limit_s = limit_s
        readers = prompts.readers
        self._tables = [reader.rows.with_format("arrow") for reader in readers]
        self._sources = msgspec.json.encode([(reader.key, reader.source.model_dump(mode="json")) for reader in readers])
        self._asked: asyncio.Queue[int] = asyncio.Queue()
        self._found: dict[int, Prompt | DatasetError | None] = {}  # None: it is being read
        self._children = ChildProcesses(Throttle(logger))
        self._child: ChildProcess | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._reading = self._loop.create_task(self._read_all())
        self._thread = threading.Thread(target=self._run, name="prompts", daemon=True)
        self._thread.start()

    def __getitem__(self, prompt_id: int) -> Prompt | None:
        """As `PromptSource`. What was read is handed out once."""
        if self._error is not None:
            raise self._error
        if prompt_id not in self._found:
            self._found[prompt_id] = None
            self._loop.call_soon_threadsafe(self._asked.put_nowait, prompt_id)
        found = self._found[prompt_id]
        if found is not None:
            del self._found[prompt_id]
        if isinstance(found, DatasetError):
            raise found
        return found

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._reading.cancel)
        self._thread.join()
        self._loop.close()

    # The thread.

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._reading)

    async def _read_all(self) -> None:
        try:
            while True:
                prompt_id = await self._asked.get()
                self._found[prompt_id] = await self._read(prompt_id)
                self._wake()
        except Exception as error:
            self._error = error
            self._wake()
        finally:
            await self._children.close()

    async def _read(self, prompt_id: int) -> Prompt | DatasetError:
        source, number = self._prompts.locate(prompt_id)
        reader = self._prompts.readers[source]
        try:
            if reader.transform is None:
                return reader[number]
            made = await self._ask(Job(source, number, packed(self._tables[source], number)), prompt_id)
        except DatasetError as error:
            return error
        except ChildEndedError as error:
            if self._child is not None:
                self._children.terminate(self._child)
                self._child = None
            return DatasetError(f"{reader.key}.transform gave nothing for {reader.place(number)}: {error}")
        return DatasetError(made.problem) if made.problem else (made.prompt, made.columns)

    async def _ask(self, job: Job, prompt_id: int) -> Made:
        reminding = asyncio.ensure_future(self._remind(self._prompts.place(prompt_id)))
        limit_s = _START_LIMIT_S
        try:
            if self._child is None:
                arguments = ("consumer.prompts.transform_worker", self._sources.decode())
                self._child = self._children.start(*arguments, source="dataset.transform")
                async with asyncio.timeout(limit_s):
                    await self._child.receive(Made)  # that it has started
            limit_s = self._limit_s
            async with asyncio.timeout(limit_s):
                return await self._child.ask(job, Made)
        except TimeoutError:
            raise ChildEndedError(f"it had not returned after {limit_s:g} s") from None
        finally:
            reminding.cancel()

    async def _remind(self, place: str) -> None:
        waited_s = 0.0
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            waited_s += _SAY_EVERY_S
            logger.warning("prompts wait for the transform, at work on %s for %.0f s", place, waited_s)


@contextlib.contextmanager
def read_aside(prompts: PromptDataset | Placeholders, wake: Callable[[], None]) -> Iterator[PromptSource]:
    """The prompts for a thread that must not wait for user code. Without a transform nothing of the user's runs."""
    if isinstance(prompts, Placeholders) or all(reader.transform is None for reader in prompts.readers):
        yield prompts
        return
    with contextlib.closing(TransformedPrompts(prompts, wake)) as transformed:
        yield transformed
