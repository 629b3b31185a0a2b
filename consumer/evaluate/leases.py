"""Evaluations on the intake's thread: leases of held-out prompts, and what comes back.

Guarantee: training goes first. A producer gets prompts to evaluate for the room that training leaves, and always for one group's
worth of completions, so that an evaluation ends however busy the producers are; only one that said it can evaluate gets any.
An answer counts when every token of it is of the evaluated version; what is not durable is asked again by the next process.
Nothing of this reaches the ledger, the journal or the replay table.
"""

import functools
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from consumer.evaluate.evaluation import Answer, Evaluation, Metric
from consumer.evaluate.results import DueVersion, EvaluationQueue
from consumer.link.dispatcher import Prompts
from consumer.link.policy_store import PolicyStore
from consumer.link.sessions import ProducerSession, RoomQueue, give_leases
from consumer.prompts.completion_limit import CompletionLimit
from protocol.channel.channel import ReceivedGroup, ServerChannel
from protocol.errors import DatasetError
from protocol.wire.codec import CodecError
from protocol.wire.messages import Ack, Lease, Nack, PolicyInfo, Sampling
from replay.groups import GroupShape, InvalidGroupError
from replay.prompt_table import FailureClass, RetryBudget


class Progress(NamedTuple):
    """Counts of the evaluation in progress; all 0 while there is none."""

    version: int = 0
    num_done: int = 0
    num_prompts: int = 0
    num_out: int = 0


class HeldOut(Prompts, Protocol):
    """The held-out prompts."""

    def environment_of(self, prompt_id: int) -> str:
        """Return the name of a prompt's environment, in a run with several."""
        ...


@dataclass(frozen=True)
class EvaluationRules:
    """The rules by which the versions of a run are evaluated."""

    num_prompts: int  # that each is asked
    sampling: Sampling
    metric: Metric
    shape: GroupShape  # of the groups that come back
    budgets: Mapping[FailureClass, RetryBudget]
    per_place: int  # evaluation leases that are worth one group's room
    timeout_s: float
    session: str  # unique per trainer process
    limit: CompletionLimit | None = None  # of a row's completions; None: that of `sampling`


@dataclass(eq=False)
class EvaluationLeases:
    """The leases of evaluations. They belong to the intake's thread; `finished` and `progress` may be read by any. `warn` logs a
    problem."""

    store: PolicyStore
    channel: ServerChannel
    due: EvaluationQueue
    prompts: HeldOut
    rules: EvaluationRules
    warn: Callable[[str, str], Any]
    clock: Callable[[], float] = time.monotonic
    skipped: Callable[[], frozenset[str]] = frozenset  # environments whose prompts are left out
    finished: queue.SimpleQueue[Evaluation] = field(default_factory=queue.SimpleQueue)
    _running: Evaluation | None = None

    @property
    def policy(self) -> PolicyInfo | None:
        """The policy that is evaluated now or, between two evaluations, next."""
        due = self._running.due if self._running else self.due.next
        return due.policy if due is not None else None

    @property
    def progress(self) -> Progress:
        it = self._running
        return Progress(it.version, it.num_done, it.num_prompts, it.leases.num_leases) if it else Progress()

    def tick(self, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """End and begin evaluations, and give leases. Return the producers that cannot be reached."""
        if self._running is None and (due := self.due.begin()) is not None:
            self.store.pin(due.published)
            self._running = self._begin(due)
        if (running := self._running) is None:
            return []
        able = [(peer, session) for peer, session in producers if session.evaluates]
        for record in running.leases.overdue(now):
            running.fail(record.lease_id, "expired", now)
            for _, session in able:
                session.evaluations.discard(record.lease_id)
        lost = list[bytes]()
        if running.next_task(now) is not None:
            queue = RoomQueue(self._room)
            queue.refill(each for each in able if each[1].may_serve(running.version))
            lost = give_leases(self.channel, queue, functools.partial(self._give, running, now), self.clock)
        if running.began is None and running.leases.num_leases:
            running.began = now
        if running.is_done:
            self.store.unpin()
            self._running, running.duration_s = None, now - (running.began or now)
            self.finished.put(running)
        return lost

    def receive(self, session: ProducerSession, message: ReceivedGroup | Nack) -> Ack | Nack | None:
        """Return the answer to what a producer made of a lease; None: it needs none. A late group settles nothing."""
        running = self._running
        if isinstance(message, Nack):
            session.evaluations.discard(message.lease_id)
            if running is not None and message.reason == "returned":
                running.leases.give_back(message.lease_id)
            elif running is not None:
                what = f"{session.name} could not answer a prompt of the evaluation: {message.reason}: {message.detail}"
                self.warn(f"evaluation_{message.reason}", what)
                running.fail(message.lease_id, message.reason, self.clock())
            return None
        lease_id = message.message.lease_id
        session.evaluations.discard(lease_id)
        if running is None or (prompt_id := running.awaits(lease_id)) is None:
            return Ack(lease_id, "duplicate", self.store.newest)
        try:
            group = self.rules.shape.parse(message.message)
            if not group.policy_version == group.newest_version == running.version:
                raise InvalidGroupError(f"it is not of policy v{running.version} alone, which is evaluated")
        except InvalidGroupError as error:
            self.warn("invalid", f"answer {lease_id} of {session.name} is invalid: {error}")
            running.fail(lease_id, "invalid", self.clock())
            return Nack(lease_id, "invalid", str(error))
        running.answer(prompt_id, Answer.of(group, self.rules.metric), message.frame)
        return Ack(lease_id, "accepted", self.store.newest)

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        if (running := self._running) is None:
            return set()
        leases = {record.lease_id for record in running.leases.leases_of(producer)}
        for lease_id in leases.difference(keep):
            running.fail(lease_id, "released", self.clock())
        return leases.intersection(keep)

    def _begin(self, due: DueVersion) -> Evaluation:
        rules, skipped = self.rules, self.skipped()
        asked: Sequence[int] = range(rules.num_prompts)
        if skipped:
            asked = [each for each in asked if self.prompts.environment_of(each) not in skipped]
        return Evaluation(due, asked, rules.budgets, rules.session, tuple(sorted(skipped)))

    def _give(self, running: Evaluation, now: float, peer: bytes, session: ProducerSession) -> bool | None:
        rules, policy, work = self.rules, running.due.policy, running.next_task(now)
        if work is None:
            return None
        record = running.lease(work, session.name, deadline=now + rules.timeout_s)
        try:
            prompt, columns = self.prompts[work.key]
            sampling = rules.sampling if rules.limit is None else rules.limit.within(rules.sampling, columns)
            lease = Lease(
                record.lease_id, work.key, record.task.attempt, prompt, columns, sampling, policy.version, rules.timeout_s,
                policy,
            )  # fmt: skip
            sent = self.channel.send(peer, lease)
        except (DatasetError, CodecError) as error:
            self.warn("bad_prompt", f"evaluation.dataset: {error}")
            running.fail(record.lease_id, "bad_prompt", now)
            return True
        session.evaluations.add(record.lease_id)
        return sent

    def _room(self, session: ProducerSession) -> int:
        return self.rules.per_place * max(1, session.room) - len(session.evaluations)
