"""The trainer's side of the measurement: everything of a trainer but the model.

Guarantee: the server, the intake thread, the rollout buffer and the journal are the product's, wired as `consumer.app.wiring`
wires them. The main thread takes batches as fast as they are full and publishes a policy after each, so that leases never
wait for training and the journal also does the commits that steps cost.
"""

import hashlib
import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.groups import SHAPE
from benchmarks.terms import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, NEEDS
from consumer.link.commit_queue import RolloutStorage
from consumer.link.dispatcher import EvaluationDispatcher, LeaseDispatcher
from consumer.link.fleet import SessionTerms
from consumer.link.intake import Dispatchers, Intake
from consumer.link.policy_store import PolicyStore, PublishedPolicy
from consumer.waiting import ThreadErrors
from protocol.channel.server import ZmqServer
from protocol.config.learning import RerollSection
from protocol.runtime.logs import Throttle
from protocol.runtime.scratch import NO_MEMORY, SharedMemory
from protocol.wire.messages import Sampling
from replay.batches.cutting import BatchCutter
from replay.batches.signal_watch import SignalWatch
from replay.buffer import RolloutBuffer
from replay.journal.disk import DiskGuard
from replay.journal.writer import Journal
from replay.prompts.failure_budgets import FailureClass, FailureWatch, RetryBudget
from replay.prompts.ledger import PromptLedger
from replay.prompts.rerolls import RerollRules
from replay.prompts.staleness import StalenessBudget
from replay.rewards import RewardRecipe

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
            BatchCutter(StalenessBudget(*steps), self.journal, signal=rewards.signal),
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
        dispatchers = Dispatchers(dispatcher, EvaluationDispatcher(store))
        self.intake = Intake(channel, storage, dispatchers, store, terms, self._errors)
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

    def publish(self, version: int, digest: str, blob: bytes) -> None:
        self.intake.publish(PublishedPolicy(version, digest, blob))

    def _publish(self) -> None:
        blob = self._version.to_bytes(8, "little")
        self.publish(self._version, hashlib.sha256(blob).hexdigest(), blob)

    def _take_batches(self) -> None:
        while not self._ended.is_set():
            batch = self.buffer.next_batch(0.1)
            if batch is None:
                continue
            self._version = batch.step + 1
            self.journal.end_step(self._version)
            self.journal.note_policy(self._version, self._version, "0" * 64)
            self._publish()
