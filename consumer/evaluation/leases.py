"""Evaluations on the intake's thread: leases of held-out prompts, and what comes back.

Guarantee: training goes first. A producer gets prompts to evaluate for the room that training leaves, and always for one group's
worth of completions, so that an evaluation ends however busy the producers are; only one that said it can evaluate gets any.
An answer counts when every token of it is of the evaluated version; what is not durable is asked again by the next process.
Nothing of this reaches the ledger, the journal or the replay table.
"""

import queue
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from consumer.evaluation.queue import DueVersion, EvaluationQueue
from consumer.intake.sessions import ProducerSession
from consumer.prompts.source import Prompt, PromptSource
from consumer.publishing.policy_store import PolicyStore
from protocol.errors import DatasetError
from protocol.transport.channel import ServerChannel
from protocol.wire.codec import CodecError
from protocol.wire.messages import Ack, Group, Lease, Nack, PolicyInfo, Sampling
from replay.groups import GroupShape, InvalidGroupError
from replay.prompts.evaluation_leases import Answer, Evaluation, Metric
from replay.prompts.failure_budgets import FailureClass, RetryBudget

_LEASES_PER_TICK = 256


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
    """How the versions of a run are evaluated.

    Args:
        num_prompts: that each is asked.
        shape: of the groups that come back.
        per_place: evaluation leases that are worth one group's room.
        session: unique per trainer process.
    """

    num_prompts: int
    sampling: Sampling
    metric: Metric
    shape: GroupShape
    budgets: Mapping[FailureClass, RetryBudget]
    per_place: int
    timeout_s: float
    session: str


class EvaluationLeases:
    """Belongs to the intake's thread; `finished` and `progress` may be read by any.

    Args:
        warn: is told of what went wrong, by kind.
    """

    def __init__(
        self,
        channel: ServerChannel,
        due: EvaluationQueue,
        prompts: PromptSource,
        rules: EvaluationRules,
        warn: Callable[[str, str], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._due = due
        self._prompts = prompts
        self._rules = rules
        self._warn = warn
        self._clock = clock
        self._now: tuple[DueVersion, Evaluation] | None = None
        self._began: float | None = None  # with its first lease
        self.finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()

    @property
    def policy(self) -> PolicyInfo | None:
        """The one that is evaluated now."""
        now = self._now
        return None if now is None else now[0].policy

    @property
    def progress(self) -> Progress:
        now = self._now
        if now is None:
            return Progress()
        evaluation = now[1]
        return Progress(evaluation.version, evaluation.num_done, evaluation.num_prompts, evaluation.leases.num_leases)

    def tick(self, store: PolicyStore, producers: Iterable[tuple[bytes, ProducerSession]], now: float) -> list[bytes]:
        """Ends what is due, begins what can begin, gives leases. Returns the producers that cannot be reached."""
        if self._now is None and (due := self._due.begin()) is not None:
            store.pin(due.published)
            rules = self._rules
            evaluation = Evaluation(due.policy.version, rules.num_prompts, rules.budgets, rules.session)
            self._now, self._began = (due, evaluation), None
        if self._now is None:
            return []
        due, evaluation = self._now
        producers = list(producers)
        for record in evaluation.leases.overdue(now):
            evaluation.fail(record.lease_id, "expired", now)
            for _, session in producers:
                session.evaluations.discard(record.lease_id)
        lost = self._give(due, evaluation, producers, now)
        if self._began is None and evaluation.leases.num_leases:
            self._began = now
        if evaluation.is_done:
            store.unpin()
            self._now = None
            self.finished.put(Finished(due, evaluation.answers(), now - (self._began or now)))
        return lost

    def receive(self, session: ProducerSession, message: Group | Nack, store: PolicyStore) -> Ack | Nack | None:
        """The answer to what came of a lease of an evaluation, of this process or another. A group that comes late, whatever it
        is, is done with."""
        session.evaluations.discard(message.lease_id)
        if isinstance(message, Nack):
            self._take_failure(session, message)
            return None
        prompt_id = None if self._now is None else self._now[1].awaits(message.lease_id)
        if self._now is None or prompt_id is None:
            return Ack(message.lease_id, "duplicate", store.newest)
        _, evaluation = self._now
        try:
            group = self._rules.shape.parse(message)
            if not group.policy_version == group.newest_version == evaluation.version:
                raise InvalidGroupError(f"it is not of policy v{evaluation.version} alone, which is evaluated")
        except InvalidGroupError as error:
            self._warn("invalid", f"answer {message.lease_id} of {session.name} is invalid: {error}")
            evaluation.fail(message.lease_id, "invalid", self._clock())
            return Nack(message.lease_id, "invalid", str(error))
        evaluation.answer(prompt_id, Answer.of(group, self._rules.metric))
        return Ack(message.lease_id, "accepted", store.newest)

    def _take_failure(self, session: ProducerSession, message: Nack) -> None:
        if self._now is None:
            return
        if message.reason == "returned":
            self._now[1].leases.give_back(message.lease_id)
            return
        what = f"{session.name} could not answer a prompt of the evaluation: {message.reason}: {message.detail}"
        self._warn(f"evaluation_{message.reason}", what)
        self._now[1].fail(message.lease_id, message.reason, self._clock())

    def release(self, producer: str, keep: Iterable[str] = ()) -> set[str]:
        """Takes back the leases of a producer, but those that it keeps, which are returned."""
        if self._now is None:
            return set()
        leases = {record.lease_id for record in self._now[1].leases.leases_of(producer)}
        for lease_id in leases.difference(keep):
            self._now[1].fail(lease_id, "released", self._clock())
        return leases.intersection(keep)

    def _give(
        self, due: DueVersion, evaluation: Evaluation, producers: list[tuple[bytes, ProducerSession]], now: float
    ) -> list[bytes]:
        rules, lost = self._rules, list[bytes]()
        able = {peer: session for peer, session in producers if session.evaluates}
        for _ in range(_LEASES_PER_TICK):
            if not able:
                return lost
            peer, session = max(able.items(), key=lambda entry: self._room(entry[1]))
            if self._room(session) <= 0:
                return lost
            found = self._next_prompt(evaluation, now)
            if found is None:
                return lost
            leased = evaluation.lease(session.name, now=now, deadline=now + rules.timeout_s)
            assert leased is not None, "one is due"
            lease_id, work = leased.lease_id, leased.work
            try:
                if isinstance(found, DatasetError):
                    raise found
                prompt, columns = found
                lease = Lease(
                    lease_id, work.key, work.attempt, prompt, columns, rules.sampling, due.policy.version, rules.timeout_s,
                    evaluates=due.policy,
                )  # fmt: skip
                sent = self._channel.send(peer, lease)
            except (DatasetError, CodecError) as error:
                self._warn("bad_prompt", f"evaluation.dataset: {error}")
                evaluation.fail(lease_id, "bad_prompt", now)
                continue
            session.evaluations.add(lease_id)
            if not sent:
                lost.append(peer)
                del able[peer]
        self._channel.wake()  # there is more to give
        return lost

    def _next_prompt(self, evaluation: Evaluation, now: float) -> Prompt | DatasetError | None:
        """None: none is due, or the next is being read."""
        prompt_id = evaluation.next_prompt(now)
        try:
            return None if prompt_id is None else self._prompts[prompt_id]
        except DatasetError as error:
            return error

    def _room(self, session: ProducerSession) -> int:
        return self._rules.per_place * max(1, session.room) - len(session.evaluations)
