"""The trainer's side of the measurement: everything of a trainer but the model.

Guarantee: the server, the intake thread, the rollout buffer and the journal are the product's, wired as `consumer.app.wiring`
wires them. The main thread takes batches as fast as they are full and publishes a policy after each, so that leases never
wait for training and the journal also does the commits that steps cost.
"""

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.groups import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, MAX_MESSAGE_BYTES, NEEDS, SHAPE
from consumer.link.commit_queue import RolloutStorage
from consumer.link.dispatcher import LeaseDispatcher
from consumer.link.fleet import SessionTerms
from consumer.link.intake import Intake
from consumer.link.policy_store import PolicyStore, PublishedPolicy
from consumer.waiting import ThreadErrors
from protocol.channel.keys import trainer_keys
from protocol.channel.server import ZmqServer
from protocol.config.learning import RerollSection
from protocol.runtime.logs import Throttle
from protocol.runtime.scratch import NO_MEMORY, SharedMemory
from protocol.wire.adapter_blob import Anchor
from protocol.wire.messages import Sampling
from replay.batch_rule import BatchRule
from replay.batch_selection import BatchSelector
from replay.buffer import RolloutBuffer
from replay.journal.retention import DiskGuard
from replay.journal.writer import Journal
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import FailureClass, RetryBudget
from replay.rerolls import RerollRules
from replay.rewards import RewardRecipe, SignalWatch
from replay.staleness import StalenessBudget
from replay.watches import FailureWatch

logger = logging.getLogger(__name__)

GROUPS_PER_STEP = 64
MAX_STALENESS = 64  # steps take no time here, and two producers are soon some apart
_NUM_PROMPTS = 1_000_000


class _Prompts:
    def __getitem__(self, prompt_id: int) -> tuple[str, dict[str, Any]]:
        return f"What is {prompt_id} + {prompt_id}?", {"answer": 2 * prompt_id}


class Acceptor:
    """Takes groups at `channel`, which it closes, while it is entered; the journal is in `folder`.

    Args:
        memory: for the policies.
        region: where it runs.
        steps: groups of each, and their `max_staleness`.
        session: of this process; a later one over the same folder goes on with its run, under another name.
        heartbeat_s: how often producers report, and after how much silence one is given up.
    """

    def __init__(
        self,
        channel: ZmqServer,
        folder: Path,
        memory: SharedMemory = NO_MEMORY,
        region: str = "",
        steps: tuple[int, int] = (GROUPS_PER_STEP, MAX_STALENESS),
        session: str = "bench",
        heartbeat_s: tuple[float, float] = (HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S),
    ) -> None:
        self.journal = Journal(folder / "journal.sqlite")
        rewards = RewardRecipe(np.ones(1, np.float32))
        budgets: dict[FailureClass, RetryBudget] = {"data": RetryBudget(3, 1.0), "infra": RetryBudget(10, 0.25)}
        rerolls = RerollSection(max_attempts=0)
        self.buffer = RolloutBuffer(
            PromptLedger(_NUM_PROMPTS, seed=0, shuffle=False, budgets=budgets, session=session, rerolls=rerolls),
            BatchSelector(StalenessBudget(*steps), self.journal, BatchRule.full(steps[0]), signal=rewards.signal),
            self.journal,
            RerollRules(rerolls),
            rewards.mean_reward,
            FailureWatch(0.5),
            SignalWatch(None),
        )
        self._version = max(0, self.journal.newest_version)
        self.buffer.restore(None, step=self._version, shape=SHAPE)
        disk = DiskGuard(folder, max_used=1.0)
        terms = SessionTerms(NEEDS, SHAPE, "bench", session, 600.0, *heartbeat_s, region=region)
        sampling = Sampling(SHAPE.num_generations, SHAPE.max_completion_length, 1.0)
        dispatcher = LeaseDispatcher(channel, self.buffer, _Prompts(), disk, sampling, 600.0, Throttle(logger))
        storage = RolloutStorage(self.buffer, self.journal, disk)
        self._errors = ThreadErrors()
        store = PolicyStore(2, memory)
        self.intake = Intake(channel, storage, dispatcher, store, terms, self._errors)
        self._ended = threading.Event()
        self._trains = threading.Thread(target=self._take_batches, name="trains")

    def __enter__(self) -> "Acceptor":
        self._publish()
        self.intake.start()
        self._trains.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._trains.join()
        self.intake.stop("finished")
        self.journal.close()
        self._errors.check()

    def publish(self, version: int, digest: str, blob: bytes, anchor: Anchor | None = None) -> None:
        self.intake.publish(PublishedPolicy(version, digest, blob, anchor=anchor))

    def _publish(self) -> None:
        blob = self._version.to_bytes(8, "little")
        self.publish(self._version, hashlib.sha256(blob).hexdigest(), blob)

    def _take_batches(self) -> None:
        while not self._ended.is_set():
            batch = self.buffer.next_batch(0.1)
            if batch is None:
                continue
            self._version = batch.first_step
            self.journal.end_step(self._version)
            self.journal.note_policy(self._version, self._version, "0" * 64)
            self._publish()


class Job(msgspec.Struct):
    folder: str
    endpoint: str
    blob_endpoint: str
    keys: str | None
    groups_per_step: int
    session: str
    core: int | None = None  # to stay on
    max_staleness: int = MAX_STALENESS
    heartbeat_s: tuple[float, float] = (HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S)


class State(msgspec.Struct):
    at: float  # of CLOCK_MONOTONIC
    joined: int  # producers
    num_bytes: int  # resident
    cpu_s: float
    groups: int  # in the journal
    refused: dict[str, int]  # connections, by reason
    counts: dict[str, int]  # of the rollout buffer
    threads: dict[str, float]  # seconds of CPU


class AcceptorProcess:
    """`log` is a file for what the process writes."""

    def __init__(self, job: Job, log: Path) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.acceptor", msgspec.json.encode(job).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
            )
        self.opened_at = self._read().at

    def look(self) -> State:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Ends it as a run ends."""
        self._process.communicate(timeout=60)
        if self._process.returncode:
            raise RuntimeError(f"the acceptor failed with exit code {self._process.returncode}")

    def _read(self) -> State:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the acceptor ended with exit code {self._process.wait()}")
        return msgspec.json.decode(line, type=State)


@contextmanager
def started(job: Job, log: Path) -> Iterator[AcceptorProcess]:
    process = AcceptorProcess(job, log)
    try:
        yield process
    finally:
        process.kill()


def _state(server: ZmqServer, acceptor: Acceptor) -> State:
    process = psutil.Process()
    with process.oneshot():
        used, resident = process.cpu_times(), process.memory_info().rss
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for thread in process.threads():  # libzmq's have names for the kernel alone
        names.setdefault(thread.id, Path(f"/proc/self/task/{thread.id}/comm").read_text().strip())
    return State(
        time.monotonic(), len(acceptor.intake.fleet.sessions), resident, used.user + used.system,
        acceptor.journal.last_seq, dict(server.refusals.counts), dict(acceptor.buffer.totals),
        {names[t.id]: t.user_time + t.system_time for t in process.threads()},
    )  # fmt: skip


def main(job: Job) -> None:
    logging.basicConfig(level=logging.ERROR)
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})
    keys = trainer_keys(Path(job.keys)) if job.keys else None
    server = ZmqServer(job.endpoint, job.blob_endpoint, MAX_MESSAGE_BYTES, keys)
    steps = (job.groups_per_step, job.max_staleness)
    with Acceptor(server, Path(job.folder), steps=steps, session=job.session, heartbeat_s=job.heartbeat_s) as acceptor:
        print(msgspec.json.encode(_state(server, acceptor)).decode(), flush=True)
        for _ in sys.stdin:
            print(msgspec.json.encode(_state(server, acceptor)).decode(), flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
