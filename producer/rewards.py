"""The pool of reward workers.

Guarantee: `score` returns rewards or raises `LeaseFailure`, within `timeout_s` per function, whatever the functions do;
a worker that hangs or dies is killed by its own process id and replaced, and no worker outlives the daemon.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.interfaces import LeaseFailure
from producer.reward_worker import LENGTH, Job, Ready, Scores
from protocol.config_rewards import RewardsSection
from protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0  # imports of the user's modules included
_EXIT_GRACE_S = 1.0
_Frame = TypeVar("_Frame", Ready, Scores)


class _Worker:
    """One child process and the socket to it."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, specs: list[str]) -> "_Worker":
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns within milliseconds
                [sys.executable, "-m", "producer.reward_worker", str(theirs.fileno()), str(os.getpid()), *specs],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    async def send(self, message: msgspec.Struct) -> None:
        body = msgspec.msgpack.encode(message)
        self._writer.write(LENGTH.pack(len(body)) + body)
        await self._writer.drain()

    async def receive(self, kind: type[_Frame]) -> _Frame:
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await self._reader.readexactly(size), type=kind)

    async def end(self) -> int:
        """For a worker that closed its socket: lets it exit with its own status, briefly, then kills what is left."""
        deadline = time.monotonic() + _EXIT_GRACE_S
        while not os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # noqa: ASYNC222
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.01)
        return await self.kill()

    async def kill(self) -> int:
        """Ends the worker and whatever it started, and returns its exit status."""
        self._writer.close()
        if self.process.returncode is None:  # not reaped yet, so the id is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return await asyncio.to_thread(self.process.wait, 30)


class RewardPool:
    """`num_workers` processes that all hold every reward function."""

    def __init__(self, section: RewardsSection) -> None:
        self._specs = [function.function for function in section.functions]
        self._timeout_s = section.timeout_s
        self._num_workers = section.num_workers
        self._slots: asyncio.Queue[_Worker | None] = asyncio.Queue()
        self._alive: set[_Worker] = set()

    @property
    def num_idle(self) -> int:
        return self._slots.qsize()

    async def start(self) -> None:
        """Starts the workers.

        Raises:
            ConfigError: a function cannot be imported.
        """
        try:
            workers = await asyncio.gather(*(self._start_worker() for _ in range(self._num_workers)))
        except LeaseFailure as failure:
            raise ConfigError(failure.detail) from failure
        for worker in workers:
            self._slots.put_nowait(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        self._alive.clear()

    async def score(
        self, prompt: Any, completions: list[Any], completion_ids: list[list[int]], columns: dict[str, Any]
    ) -> tuple[NDArray[np.float32], float]:
        """Rewards as (completions, functions), NaN for missing, and the seconds it took.

        Raises:
            LeaseFailure: a function failed; the reason names it.
        """
        worker = await self._slots.get()
        started = time.monotonic()
        reusable = False
        try:
            worker = worker or await self._start_worker()
            answers = await self._ask(worker, Job(prompt, completions, completion_ids, columns))
            reusable = True
        finally:
            if worker is not None and not reusable:
                await self._discard(worker)
            self._slots.put_nowait(worker if reusable else None)
        for spec, scores in zip(self._specs, answers, strict=False):
            if scores.rewards is None:
                raise LeaseFailure("reward_failed", f"{spec} {scores.problem}")
        rewards = np.array([scores.rewards for scores in answers], dtype=np.float32).T
        return rewards, time.monotonic() - started

    async def _ask(self, worker: _Worker, job: Job) -> list[Scores]:
        """The answer of every function, up to the first that failed. After a `LeaseFailure` the worker is of no use."""
        answers: list[Scores] = []
        try:
            await asyncio.wait_for(worker.send(job), self._timeout_s)
            for _ in self._specs:
                answers.append(await asyncio.wait_for(worker.receive(Scores), self._timeout_s))
                if answers[-1].rewards is None:
                    break
        except TimeoutError:
            limit = f"rewards.timeout_s={self._timeout_s:g} seconds"
            raise LeaseFailure(
                "reward_failed",
                f"{self._specs[len(answers)]} did not return within {limit} and its worker was killed; make it faster, "
                "give it a deadline of its own, or raise rewards.timeout_s",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            ending = _describe(await worker.end())
            raise LeaseFailure(
                "reward_failed", f"{self._specs[len(answers)]} ended its worker process ({ending})"
            ) from None
        return answers

    async def _start_worker(self) -> _Worker:
        worker = await _Worker.start(self._specs)
        self._alive.add(worker)
        usable = False
        try:
            ready = await asyncio.wait_for(worker.receive(Ready), _START_TIMEOUT_S)
            usable = not ready.problems
            problem = "\n".join(ready.problems)
        except TimeoutError:
            problem = (
                f"rewards.functions: importing {', '.join(self._specs)} took more than {_START_TIMEOUT_S:g} seconds"
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            ending = _describe(await worker.end())
            problem = f"rewards.functions: importing {', '.join(self._specs)} ended the worker process ({ending})"
        finally:
            if not usable:
                await self._discard(worker)
        if problem:
            raise LeaseFailure("reward_failed", problem)
        return worker

    async def _discard(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        await worker.kill()


def _describe(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
