"""Evaluations on the intake's thread: leases of held-out prompts, and what comes back.

Guarantee: training goes first. A producer gets prompts to evaluate for the room that training leaves, and always for one group's
worth of completions, so that an evaluation ends however busy the producers are; only one that said it can evaluate gets any.
An answer counts when every token of it is of the evaluated version; what is not durable is asked again by the next process.
Nothing of this reaches the ledger, the journal or the replay table.
"""

import functools
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from consumer.evaluation.results import DueVersion, EvaluationQueue
from consumer.intake.dispatcher import EvaluationDispatcher
from consumer.intake.sessions import ProducerSession, give_leases
from consumer.prompts.source import PromptSource
from protocol.errors import DatasetError
from protocol.transport.channel import ServerChannel
from protocol.wire.codec import CodecError
from protocol.wire.messages import Ack, Group, Lease, Nack, PolicyInfo, Sampling
from replay.groups import GroupShape, InvalidGroupError
from replay.prompts.evaluation_leases import Answer, Evaluation, Metric
from replay.prompts.failure_budgets import FailureClass, RetryBudget


class Finished(NamedTuple):
    """An evaluation whose every prompt is answered or given up."""

    due: DueVersion
    answers: list[Answer]
    duration_s: float


class Progress(NamedTuple):
    """Of the evaluation in progress; all 0 while there is none."""

    version: int = 0
    num_done: int = 0
    num_prompts: int = 0
    num_out: int = 0


@dataclass(frozen=True)
class EvaluationRules:
    """How the versions of a run are evaluated."""

    num_prompts: int  # that each is asked
    sampling: Sampling
    metric: Metric
    shape: GroupShape  # of the groups that come back
    budgets: Mapping[FailureClass, RetryBudget]
    per_place: int  # evaluation leases that are worth one group's room
    timeout_s: float
    session: str  # unique per trainer process


class _InProgress(NamedTuple):
    due: DueVersion
    evaluation: Evaluation


@dataclass(eq=False)
class EvaluationLeases(EvaluationDispatcher):
    """Belongs to the intake's thread; `finished` and `progress` may be read by any. `warn` is told what went wrong."""

    channel: ServerChannel
    due: EvaluationQueue
    prompts: PromptSource
    rules: EvaluationRules
    warn: Callable[[str, str], Any]
    clock: Callable[[], float] = time.monotonic
    finished: queue.SimpleQueue[Finished] = field(default_factory=queue.SimpleQueue)
    _now: _InProgress | None = None
    _began: float | None = None  # with its first lease

    @property
    def policy(self) -> PolicyInfo | None:
        now = self._now
        return now and now.due.policy

    @property
    def progress(self) -> Progress:
        if (now := self._now) is None:
            return Progress()
        of = now.evaluation
        return Progress(of.version, of.num_done, of.num_prompts, of.leases.num_leases)

    def tick(self, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """Ends what is due, begins what can begin, gives leases. Returns the producers that cannot be reached."""
        rules = self.rules
        if self._now is None and (due := self.due.begin()) is not None:
            self.store.pin(due.published)
            evaluation = Evaluation(due.policy.version, rules.num_prompts, rules.budgets, rules.session)
            self._now, self._began = _InProgress(due, evaluation), None
        if self._now is None:
            return []
        due, evaluation = self._now
        able = [(peer, session) for peer, session in producers if session.evaluates]
        for record in evaluation.leases.overdue(now):
            evaluation.fail(record.lease_id, "expired", now)
            for _, session in able:
                session.evaluations.discard(record.lease_id)

        lost = give_leases(self.channel, able, self._room, functools.partial(self._give, due.policy, evaluation, now))
        if self._began is None and evaluation.leases.num_leases:
            self._began = now
        if evaluation.is_done:
            self.store.unpin()
            self._now = None
            self.finished.put(Finished(due, evaluation.answers(), now - (self._began or now)))
        return lost

    def receive(self, session: ProducerSession, message: Group | Nack) -> Ack | Nack | None:
        """A group that comes late, whatever it is, is done with."""
        session.evaluations.discard(message.lease_id)
        evaluation = self._now and self._now.evaluation
        if isinstance(message, Nack):
            if evaluation is not None and message.reason == "returned":
                evaluation.leases.give_back(message.lease_id)
            elif evaluation is not None:
                what = f"{session.name} could not answer a prompt of the evaluation: {message.reason}: {message.detail}"
                self.warn(f"evaluation_{message.reason}", what)
                evaluation.fail(message.lease_id, message.reason, self.clock())
            return None
        prompt_id = None if evaluation is None else evaluation.awaits(message.lease_id)
        if evaluation is None or prompt_id is None:
            return super().receive(session, message)
        try:
            group = self.rules.shape.parse(message)
            if not group.policy_version == group.newest_version == evaluation.version:
                raise InvalidGroupError(f"it is not of policy v{evaluation.version} alone, which is evaluated")
        except InvalidGroupError as error:
            self.warn("invalid", f"answer {message.lease_id} of {session.name} is invalid: {error}")
            evaluation.fail(message.lease_id, "invalid", self.clock())
            return Nack(message.lease_id, "invalid", str(error))
        evaluation.answer(prompt_id, Answer.of(group, self.rules.metric))
        return Ack(message.lease_id, "accepted", self.store.newest)

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        if self._now is None:
            return set()
        evaluation = self._now.evaluation
        leases = {record.lease_id for record in evaluation.leases.leases_of(producer)}
        for lease_id in leases.difference(keep):
            evaluation.fail(lease_id, "released", self.clock())
        return leases.intersection(keep)

    def _give(
        self, policy: PolicyInfo, evaluation: Evaluation, now: float, peer: bytes, session: ProducerSession
    ) -> bool | None:
        rules, problem = self.rules, None
        next_work = evaluation.next_work(now)
        if next_work is None:
            return None
        try:
            prompt = self.prompts[next_work.key]
        except DatasetError as error:
            prompt, problem = ("", {}), error
        if prompt is None:  # it is being read
            return None
        leased = evaluation.lease(next_work, session.name, deadline=now + rules.timeout_s)
        lease_id, work = leased.lease_id, leased.work
        try:
            if problem is not None:
                raise problem
            lease = Lease(
                lease_id, work.key, work.attempt, *prompt, rules.sampling, policy.version, rules.timeout_s, policy
            )
            sent = self.channel.send(peer, lease)
        except (DatasetError, CodecError) as error:
            self.warn("bad_prompt", f"evaluation.dataset: {error}")
            evaluation.fail(lease_id, "bad_prompt", now)
            return True
        session.evaluations.add(lease_id)
        return sent

    def _room(self, session: ProducerSession) -> int:
        return self.rules.per_place * max(1, session.room) - len(session.evaluations)
