"""The processes of reward workers, on the producer's side.

Guarantee: `WorkerPool.call` returns or raises `WorkerLostError` within the limit of its functions, whatever they do. A worker
that hangs, dies or takes too much memory is killed with all that it started, and replaced, and none outlives the daemon. A
call gives back its slot in every case and at once, also when it is cancelled or its worker cannot be killed.

The memory limit is for resident memory, which is read ten times a second; a process that a worker starts counts within two
seconds. RLIMIT_AS and RLIMIT_DATA count what torch and CUDA reserve and do not use.
"""

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from producer.rewards.messages import Answer, Call, Failure, Job, Ready, Scores, Source
from protocol.errors import UNSENDABLE, ConfigError, DeviceError
from protocol.runtime.child import ChildEndedError, ChildProcess, ChildProcesses
from protocol.runtime.logs import Throttle

logger = logging.getLogger(__name__)

_ASYNC_GRACE_S = 1.0  # an asynchronous function keeps its limit itself, unless it blocks the loop
_POLL_S = 0.1


class WorkerLostError(Exception):
    """The worker of a call was killed, or could not be started: nothing was scored."""

    def __init__(self, reason: Failure, problem: str, *, of_device: bool = False) -> None:
        super().__init__(problem)
        self.reason: Failure = reason
        self.of_device = of_device


class WorkerPool:
    """Runs `num_workers` processes that all hold the functions of `sources`, by name; a call takes one process. Each process with
    its children may have `max_memory_bytes` resident, and gets the variables of `environment` beside the daemon's own."""

    def __init__(
        self,
        sources: dict[str, Source],
        num_workers: int,
        max_memory_bytes: int | None,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.asynchronous: list[int] = []
        self.columns: list[list[str]] = []  # that each function needs
        self._sources = msgspec.json.encode(list(sources.values())).decode()
        self._names = list(sources)
        self._shown = ", ".join(f"{name} ({source.place})" for name, source in sources.items())
        self._max_memory_bytes = max_memory_bytes
        self._start_timeout_s = start_timeout_s
        self._environment = environment
        self._slots: asyncio.Queue[ChildProcess | None] = asyncio.Queue()
        self._children = ChildProcesses(Throttle(logger))

    @property
    def num_idle(self) -> int:
        return self._slots.qsize()

    async def start(self) -> None:
        """Start the workers. Raise ConfigError if a function cannot be imported or made, DeviceError if a GPU is the cause."""
        try:
            workers = await asyncio.gather(*(self._start_worker() for _ in range(self.num_workers)))
        except WorkerLostError as error:
            raise (DeviceError if error.of_device else ConfigError)(str(error)) from error
        for worker in workers:
            self._slots.put_nowait(worker)

    async def close(self) -> None:
        await self._children.close()

    async def call(self, functions: list[int], jobs: list[Job], limits_s: list[float]) -> list[Scores]:
        """Return the scores of these functions for a job each. Raise WorkerLostError if a function hung, crashed or took too
        much memory, or no worker could be started."""
        try:
            call = await asyncio.to_thread(_encoded, Call(functions, jobs, limits_s))
        except UNSENDABLE as error:
            raise WorkerLostError("invalid", f"cannot be sent this group: {error}") from None
        worker = await self._slots.get()
        reusable = False
        grace_s = _ASYNC_GRACE_S if functions[0] in self.asynchronous else 0.0
        try:
            worker = worker or await self._start_worker()
            worker.output.begin(f"reward {', '.join(self._names[index] for index in functions)}")
            answer = await self._watched(worker, call, max(limits_s), grace_s)
            if not _fits(answer, jobs):
                raise WorkerLostError("crashed", "lost its worker: its answer does not fit the request")
            reusable = True
            return answer.scores
        finally:
            self._slots.put_nowait(worker if reusable else None)
            if worker is not None and not reusable:
                self._children.terminate(worker)

    async def _watched(self, worker: ChildProcess, call: msgspec.Raw, limit_s: float, grace_s: float) -> Answer:
        """Return the answer to a call, unless time or memory run out first."""
        asked = asyncio.ensure_future(worker.ask(call, Answer))
        try:
            async with asyncio.timeout(limit_s + grace_s):
                while not (await asyncio.wait({asked}, timeout=_POLL_S))[0]:
                    await self._check_memory(worker)
            return asked.result()
        except TimeoutError:
            raise WorkerLostError(
                "timeout",
                f"did not return within {limit_s:g} seconds and its worker was killed; make it faster, give it a deadline of its "
                "own, or raise its timeout_s (or rewards.timeout_s)",
            ) from None
        except ChildEndedError as error:
            raise WorkerLostError("crashed", f"lost its worker: {error}") from None
        finally:
            if not asked.cancel() and not asked.cancelled():
                asked.exception()  # asyncio reports an exception that was never read

    async def _check_memory(self, worker: ChildProcess) -> None:
        limit = self._max_memory_bytes
        if limit is not None and (taken := await asyncio.to_thread(worker.process.resident_bytes)) > limit:
            raise WorkerLostError(
                "memory",
                f"took {taken / 2**20:,.0f} MiB, more than rewards.max_memory_bytes={limit} ({limit / 2**20:,.0f} MiB), and "
                "its worker was killed; make it leaner, or raise the limit",
            )

    async def _start_worker(self) -> ChildProcess:
        source, worker, problem = f"rewards {self._shown}, while loading,", None, "cancelled"
        of_device = False
        try:
            worker = self._children.start(
                "producer.rewards.worker", self._sources, source=source, environment=self._environment
            )
            ready = await asyncio.wait_for(worker.receive(Ready), self._start_timeout_s)
            self.asynchronous, self.columns = ready.asynchronous, ready.columns
            of_device, problem = ready.of_device, "\n".join(ready.problems)
        except TimeoutError:
            problem = f"rewards.functions: loading {self._shown} took more than {self._start_timeout_s:g} seconds"
        except ChildEndedError as error:
            problem = f"rewards.functions: {self._shown} have no worker: {error}"
        finally:
            if problem and worker is not None:
                self._children.terminate(worker)
        if problem or worker is None:
            raise WorkerLostError("crashed", problem, of_device=of_device)
        return worker


def _encoded(call: Call) -> msgspec.Raw:
    jobs = [job.in_pieces(msgspec.msgpack) for job in call.jobs]
    return msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(call, jobs=jobs)))


def _fits(answer: Answer, jobs: list[Job]) -> bool:
    """Return whether the answer fits the jobs; code of users could have written it."""
    counts = [len(job.completions) for job in jobs]
    return len(answer.scores) == len(jobs) and all(
        scores.failed.keys() <= set(range(count)) and (scores.rewards is None or len(scores.rewards) == count)
        for scores, count in zip(answer.scores, counts, strict=True)
    )
