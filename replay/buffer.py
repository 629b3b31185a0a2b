"""The rollout buffer: prompt ledger, batch selector and journal behind one lock, shared by the two threads of the trainer.

Guarantee: every public method holds the lock, so any thread may call it. Every offered group gets one answer, every prompt is
done once, and the numbers of `totals` add up. A decision is in the journal before anything else knows of it: a group before its
producer is answered, the batch of a step before the step begins, the dead letter of a prompt before the prompt leaves the
table. On a full disk nothing is decided and nothing is lost, and the same call succeeds later; a lease that would end its prompt
stays, and ends later for the reason that it had first. Methods wait for the disk alone, except `next_batch` and `has_batch`,
which have a timeout.
"""

import contextlib
import functools
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from replay.batch_selection import BatchSelector, GroupStats, OfferedGroup, TrainingBatch, count_batch
from replay.groups import GroupShape, RolloutGroup
from replay.journal.recovery import RecoveredPrompt, recover
from replay.journal.schema import DeadLetter, JournalEntry, Outcome
from replay.journal.writer import Journal, JournalFullError
from replay.lease_ids import Key, LeaseId, UnknownLeaseError
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import Held, LeaseRecord, PromptTask, failure_class
from replay.rerolls import RerollRules, attempt_counts
from replay.rewards import SignalWatch
from replay.shares import EnvironmentShares
from replay.signal_chances import GradedGroup
from replay.sources import ONE, Sources
from replay.watches import SKIPPED, FailureWatch, RewardWatch, skipped_before

logger = logging.getLogger(__name__)

Answer = Outcome | Literal["duplicate", "unknown_lease"]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_MAX_STATS = 4096  # groups in the report of a step, the newest


class EnvironmentState(NamedTuple):
    """An environment in this moment."""

    leases: int  # in flight
    is_skipped: bool


def _locked(
    method: "Callable[Concatenate[RolloutBuffer, _Arguments], _Result]",
) -> "Callable[Concatenate[RolloutBuffer, _Arguments], _Result]":
    """Make a method hold the lock."""

    @functools.wraps(method)
    def call(self: "RolloutBuffer", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self.changed:
            return method(self, *args, **kwargs)

    return call


@dataclass(eq=False)
class RolloutBuffer:
    """The trainer's groups and prompts. The I/O thread leases and offers, the main thread takes batches and publishes.

    Attributes:
        changed: the lock; is notified when groups were offered.
        newest_version: the newest policy that this run ever published, in this process or one before; -1 if none.
    """

    ledger: PromptLedger
    selector: BatchSelector
    journal: Journal
    rules: RerollRules
    mean_reward: Callable[[RolloutGroup], float]  # for the journal to show; NaN if nothing is scored
    failures: FailureWatch
    signals: SignalWatch
    shares: EnvironmentShares | None = None  # of a run with several environments
    totals: Counter[str] = field(default_factory=Counter)  # of everything that happened
    sources: Sources = ONE  # for whose prompts there are totals of their own
    rewards: RewardWatch = field(default_factory=RewardWatch)
    changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    newest_version: int = field(default=-1, init=False)
    _version: int = field(default=-1, init=False)  # -1 before the first policy is published
    # Since the last batch:
    _stats: deque[GroupStats] = field(default_factory=lambda: deque(maxlen=_MAX_STATS), init=False)
    # The reason and detail of leases that a full disk keeps from ending:
    _pending_dead_letters: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)

    # Leases

    @_locked
    def lease(
        self, producer: str, *, now: float, timeout_s: float, serves: int | None = None, capacity: int = 0
    ) -> LeaseRecord[Key] | None:
        """Lease the next prompt to `producer`, which comes to no policy newer than `serves` (None: to any); return None while the
        staleness budget is spent, or the environments that have places wait for one that has none. All producers take `capacity`
        leases."""
        floor = self._next_floor()
        if floor > self._version:
            return None
        version = self._version if serves is None else min(serves, self._version)
        full, ledger = frozenset[str](), self.ledger
        if self.shares is not None:
            waiting = {name: ledger.leases.num_waiting(name) for name in self.shares.parts}
            full = self.shares.full(ledger.leases.in_lane, capacity, ledger.newest, waiting)
        deadline = now + timeout_s
        record = self.ledger.lease(producer, version=version, policy_floor=floor, now=now, deadline=deadline, full=full)
        if record is None:
            return None
        self._count("leased", record.task.key)
        self.totals["skipped"] = self.ledger.order.num_skipped
        self.totals["rerolls_leased"] += record.task.key.reroll > 0
        return record

    def _count(self, what: str, key: Key) -> None:
        """Add 1 to a total, and to that of the prompt's source."""
        self.totals[what] += 1
        self.sources.count(self.totals, what, [key.prompt_id])

    @_locked
    def next_floor(self) -> int:
        """Return the oldest policy that may answer the next lease."""
        return self._next_floor()

    def _next_floor(self) -> int:
        selector = self.selector
        pending = self.ledger.leases.num_leases + selector.num_taken(self._num_answers())
        return selector.budget.floor(pending, selector.next_step, selector.least_fresh)

    @_locked
    def adopt(
        self, producer: str, lease_ids: Sequence[str], *, deadline: float, of_this_run: bool = True
    ) -> dict[str, bool | None]:
        """Tell which leases a producer keeps that it had before a silence, or from another trainer process: True for a lease that
        it keeps, False for one that is not wanted, None if the journal has its group. Leases that are not `of_this_run` may be
        another run's, unless this process gave them."""
        known = self.journal.known(lease_ids)
        result: dict[str, bool | None] = dict.fromkeys(lease_ids, False) | dict.fromkeys(known)
        for name in [name for name in result if name not in known]:
            with contextlib.suppress(UnknownLeaseError):
                lease = LeaseId.parse(name)
                result[name] = self.ledger.adopt(lease, producer, deadline=deadline, of_this_run=of_this_run)
        self.totals["adopted"] += sum(bool(wanted) for wanted in result.values())
        return result

    @_locked
    def give_back(self, lease_id: str) -> None:
        """Take a lease back that its producer returned; its prompt waits again."""
        self.ledger.leases.give_back(lease_id)
        self.totals["returned"] += 1

    @_locked
    def release(self, producer: str, now: float, keep: frozenset[str] = frozenset()) -> list[LeaseRecord[Key]]:
        """Take back the leases of a producer that left, except those in `keep`."""
        lost = [record for record in self.ledger.leases.leases_of(producer) if record.lease_id not in keep]
        return self._take_back(lost, "released", now)

    @_locked
    def leased_to(self, producer: str) -> set[str]:
        """Return the leases that `producer` has now."""
        return {record.lease_id for record in self.ledger.leases.leases_of(producer)}

    @_locked
    def fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        """End a lease without a group. Returns as `PromptTable.fail`. On JournalFullError the prompt's budget is spent, but the
        lease stays, and `expire` tries again."""
        return self._fail(lease_id, reason, detail, now)

    @_locked
    def expire(self, now: float) -> list[LeaseRecord[Key]]:
        """Take back every lease whose deadline has passed, and end the leases that a full disk kept, if there is room now."""
        overdue = self.ledger.leases.overdue(now)
        with contextlib.suppress(JournalFullError):
            for lease_id, (reason, detail) in list(self._pending_dead_letters.items()):
                self._fail(lease_id, reason, detail, now)
        return self._take_back(overdue, "expired", now)

    def _fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        def add_dead_letter(task: PromptTask[Key]) -> None:
            self._pending_dead_letters.setdefault(lease_id, (reason, detail))
            self.journal.add_dead_letter(DeadLetter(*task.key, task.attempt, failure_class(reason), reason, detail))
            self._count("dead_letters", task.key)
            self.failures.note(self.ledger.environment_of(task.key.prompt_id), f"{reason}: {detail}")

        again = self.ledger.leases.fail(lease_id, reason, now, add_dead_letter)
        self._pending_dead_letters.pop(lease_id, None)
        self.totals[f"failed_{reason}"] += again is not None
        if again is not None:
            prompt_id = LeaseId.parse(lease_id).key.prompt_id
            self.sources.count(self.totals, "failed", [prompt_id])
            if reason == "reward_failed":
                self.rewards.note(self.totals, self.ledger.environment_of(prompt_id), None, b"", detail)
        if again is False:
            self._skip_failing()
        return again

    def _skip_failing(self) -> None:
        """Go on without the environments whose prompts are given up. On a full disk the next prompt that is given up decides."""
        for name, skip in self.failures.due():
            with contextlib.suppress(JournalFullError):
                self.journal.note_facts(self.failures.with_skipped(name, skip))
                self.failures.skip(name, skip)
                self.ledger.close(name)
                self.shares = self.shares.without(name) if self.shares else None

    def _take_back(self, records: Sequence[LeaseRecord[Key]], reason: str, now: float) -> list[LeaseRecord[Key]]:
        """Return the leases that ended; on a full disk the others stay, and `expire` tries again."""
        ended = []
        for record in records:
            with contextlib.suppress(JournalFullError):
                self._fail(record.lease_id, reason, f"leased to {record.producer}", now)
                ended.append(record)
        return ended

    # Groups

    @_locked
    def offer(self, received: Sequence[OfferedGroup]) -> list[Answer]:
        """Decide durably what becomes of finished groups; return the answers in their order. On JournalFullError nothing was
        decided."""
        answered = self.journal.known(each.group.lease_id for each in received)
        taken: set[Key] = set()
        answers: list[Answer] = []
        entries: list[tuple[RolloutGroup, JournalEntry]] = []
        for each in received:
            group = each.group
            try:
                key = self.ledger.find(group.lease, of_this_run=each.of_this_run)
            except UnknownLeaseError:
                answers.append("unknown_lease")
                continue
            if group.lease_id in answered or key is None or key in taken:
                answers.append("duplicate")
                continue
            answered.add(group.lease_id)
            entry = self._entry(each, self._num_answers() + len(taken) + 1)
            if entry.outcome != "stale":
                taken.add(key)
            answers.append(entry.outcome)
            entries.append((group, entry))
        if entries:
            self.journal.append([entry for _, entry in entries])
        for group, entry in entries:
            environment = self.ledger.environment_of(entry.lease.key.prompt_id)
            self.rewards.note(self.totals, environment, group.rewards, entry.missing)
            self._admit(group, entry)
        self.totals.update(answers)
        self.changed.notify_all()
        return answers

    def _entry(self, received: OfferedGroup, number: int) -> JournalEntry:
        """Make the row of a group, which is the run's answer of this number if it is not stale."""
        group = received.group
        outcome: Outcome = "accepted" if self.selector.signal(group) > 0.0 else "no_signal"
        if group.policy_version < self.selector.budget.oldest_usable(self.selector.next_step):
            outcome = "stale"
        reward = self.mean_reward(group)
        return JournalEntry(
            group.lease, received.producer, group.policy_version, outcome, None if math.isnan(reward) else reward,
            self.rules.grade(group), group.num_tokens, received.frame, received.missing,
            None if outcome == "stale" else number,
        )  # fmt: skip

    def _admit(self, group: RolloutGroup, entry: JournalEntry) -> None:
        key, outcome, grade = entry.lease.key, entry.outcome, entry.grade
        self.ledger.mark_answered(entry.lease, Held(grade.verdict, entry.policy_version))
        self._stats.append(GroupStats.of(group, outcome, None if outcome == "stale" else grade))
        self.sources.count(self.totals, outcome, [key.prompt_id])
        if outcome == "stale":
            self.ledger.requeue(key)
            return
        self.failures.note(self.ledger.environment_of(key.prompt_id))
        self.signals.note(group, entry.reward, has_signal=outcome == "accepted")
        if (draws := self.ledger.draws) is not None:
            known = (key.prompt_id, grade.verdict, outcome == "accepted", entry.policy_version)
            draws.note(GradedGroup(*known, grade.num_scored, grade.num_successes, key.reroll))
        numbers = (1, grade.num_scored, grade.num_successes)
        self.totals.update(dict(zip(attempt_counts(key.reroll), numbers, strict=True)))
        if entry.answer is None or outcome == "no_signal":
            self._finish(key)
        else:
            self.selector.insert(group, entry.answer)

    def _finish(self, key: Key) -> None:
        """The prompt's group was used, trained or not: end the prompt's attempt; it may return later, or sit out epochs."""
        held = self.ledger.mark_done(key)
        version = self.rules.return_version(key, held.verdict, held.policy_version)
        if version is not None:
            self.totals["deferred"] += self.ledger.defer(key, version)
        until_epoch = self.rules.cooldown_until(key, held.verdict)
        if until_epoch is not None:
            self.totals["rested"] += 1
            self.ledger.order.cool_down(key.prompt_id, until_epoch)

    # Batches

    @_locked
    def next_batch(self, timeout_s: float) -> TrainingBatch | None:
        """Take the batch of the next step, whose groups have signal, none too stale. Return None if there is none within the
        timeout (or a little earlier, when a group arrived that did not complete one), or no room on the disk.

        Raises:
            DataFailuresError: too many of the last prompts failed for good, a reward failed for all, or nothing was scored.
            NoSignalError: too many groups in a row had no signal.
        """
        return self._within(timeout_s, self._take_batch)

    @_locked
    def has_batch(self, timeout_s: float) -> bool:
        """Return whether `next_batch` would find a batch within the timeout (or a little earlier, as there). Raises the same."""
        return self._within(timeout_s, lambda: self._has_batch() or None) is not None

    def _within(self, timeout_s: float, attempt: Callable[[], _Result | None]) -> _Result | None:
        result = attempt()
        if result is None:
            self.changed.wait(timeout_s)
            result = attempt()
        if result is None:
            self.signals.check()
        return result

    def _take_batch(self) -> TrainingBatch | None:
        """Take the next batch, without groups that have become too old; None if there is none, or no room to note it."""
        self._check()
        totals = self.totals
        try:
            self._drop_stale()
            batch = self.selector.take(num_answers=self._num_answers(), num_trained=self._num_trained())
        except JournalFullError:
            return None
        if batch is None:
            return None
        for group in batch.groups[: batch.num_fresh]:
            if self.ledger.is_held(group.lease.key):  # a batch that the checkpoint knows as begun has none
                self._finish(group.lease.key)
        count_batch(totals, batch, self.sources)
        batch = batch._replace(arrivals=list(self._stats))
        if (draws := self.ledger.draws) is not None:
            now = draws.curriculum.now if draws.curriculum else None
            batch = batch._replace(curriculum=now, prompt_weights=draws.weights(self.sources))
        self._stats.clear()
        return batch

    def _check(self) -> None:
        self.failures.check()
        self.rewards.check(self.totals)

    def _has_batch(self) -> bool:
        self._check()
        try:
            self._drop_stale()
        except JournalFullError:
            return False
        return self.selector.has_batch(num_answers=self._num_answers(), num_trained=self._num_trained())

    def _drop_stale(self) -> None:
        for group in self.selector.remove_stale():
            self.ledger.requeue(group.lease.key)
            self._count("went_stale", group.lease.key)

    def _num_answers(self) -> int:
        """Return how many groups came in time, with signal and without."""
        return self.totals["accepted"] + self.totals["no_signal"]

    def _num_trained(self) -> int:
        """Return how many groups were trained, counting every time."""
        return self.totals["trained"] + self.totals["replayed"]

    @_locked
    def oldest_usable(self) -> int | None:
        """Return the oldest policy whose groups the next batch may have. None while a newer policy is on its way."""
        selector, budget = self.selector, self.selector.budget
        if self._version < budget.version_at(selector.next_step):
            return None
        return budget.oldest_usable(selector.next_step)

    @_locked
    def progress(self) -> int:
        """Return the number of groups that brought a batch nearer. A group without signal counts where
        `guards.max_groups_without_signal` bounds how many may come."""
        return self.totals["accepted"] + self.signals.is_bounded * self.totals["no_signal"]

    @_locked
    def check_stalled(self) -> None:
        """Call it when no batch came for too long; raises as `SignalWatch.check_stalled`."""
        self.signals.check_stalled(ever_had_signal=self.totals["accepted"] > 0)

    @_locked
    def published(self, version: int) -> None:
        """Note that producers can generate with `version` from now on."""
        self._version = version
        if self.ledger.draws is not None:
            self.ledger.draws.version = version
        self.newest_version = max(self.newest_version, version)

    # Checkpoints

    @_locked
    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that, with the journal, lets a run train every prompt that was not trained before."""
        return {
            "ledger": self.ledger.state(),
            "replay": self.selector.state(),
            "last_answer": self.selector.last_answer,
            "counts": dict(self.totals),
            "journal_seq": self.journal.last_seq,
        }

    @_locked
    def restore(self, state: dict[str, Any] | None, *, step: int, shape: GroupShape, comparable: bool = True) -> None:
        """Restore a checkpoint (None: the beginning) after `step` steps, and what the journal holds beyond it, if that is
        `comparable`: made under settings that still fit. Raises DatasetError if the dataset changed its size."""
        if state is not None:
            self.ledger.restore(state["ledger"])
            self.totals.clear()
            self.totals.update(state["counts"])
        since_seq, selector = state["journal_seq"] if state else 0, self.selector
        found = recover(
            self.journal, step, since_seq, selector.budget, smaller=not selector.rule.waits_for_all,
            comparable=comparable, sources=self.sources,
        )  # fmt: skip
        if self.ledger.draws is not None:
            for group in found.graded:
                self.ledger.draws.note(group)
        self._restore_prompts(found.prompts)
        selector.restore(
            found,
            step,
            lambda lease_ids: [shape.load(frame) for frame in self.journal.frames(lease_ids)],
            state["replay"] if state and comparable else [],
            state["last_answer"] if state else 0,
        )
        self._try_again()
        self.newest_version = self.journal.newest_version
        self.totals["quarantined"] += found.quarantined
        self.totals.update(found.counts)
        if not comparable:  # what was answered before counts for no batch
            selector.last_answer = self._num_answers()
        if found.batches or found.ready or found.quarantined:
            numbers = (len(found.ready), len(found.batches), found.quarantined)
            text = "journal: %d groups ready, %d steps to train again with the same batches, %d groups quarantined"
            logger.info(text, *numbers)

    def _try_again(self) -> None:
        """Open the environments that an earlier process skipped."""
        before = skipped_before(self.journal.facts())
        for name, skip in before.items():
            text = "environments.%s: it was skipped, and is tried again now. Then its last prompt was given up because of %s"
            logger.warning(text, name, skip.reason)
        if before:
            self.journal.note_facts({SKIPPED: "{}"})

    def _restore_prompts(self, recovered: Sequence[RecoveredPrompt]) -> None:
        for key, status, verdict, policy_version, is_new in recovered:
            # A reroll that went stale, and whose deferral is not known here, waits until that comes again.
            is_new_answer = is_new and status != "again"
            if not self.ledger.restore_prompt(key, Held(verdict, policy_version), is_new=is_new_answer):
                continue
            if status == "again":
                self.ledger.requeue(key)
            elif status == "settled":
                self._finish(key)

    @_locked
    def environments(self) -> dict[str, EnvironmentState]:
        """Return the state of each environment; nothing in a run without several."""
        in_lane, skipped = self.ledger.leases.in_lane, self.failures.skipped
        return {name: EnvironmentState(in_lane[name], name in skipped) for name in sorted(self.failures.environments)}

    @_locked
    def depth(self) -> dict[str, int]:
        """Return how many groups and prompts are where, for messages and metrics."""
        return {
            "ready": self.selector.num_ready,
            "replayable": self.selector.num_replayable,
            "leased": self.ledger.leases.num_leases,
            "deferred": self.ledger.num_deferred,
            "epoch": self.ledger.order.epoch,
        }
