"""What becomes of prompts: their leases end, their groups are settled, and they return, sit out or are given up.

Guarantee: a prompt is given up after its dead letter is in the journal. A lease that would give its prompt up stays while the
disk is full, and ends later for the reason that it had first. Not thread-safe: the rollout buffer holds its lock.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence

from replay.journal.database import JournalFullError
from replay.journal.recovery import RecoveredPrompt
from replay.journal.tables import DeadLetter
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId, UnknownLeaseError
from replay.prompts.failure_budgets import FailureWatch, failure_class
from replay.prompts.leases import Held, LeaseRecord
from replay.prompts.ledger import PromptLedger
from replay.prompts.rerolls import RerollRules


class PromptLifecycle:
    """See the module's guarantee.

    Args:
        rules: who returns after a failure, and who sits out after a success.
        totals: of what has happened, which this adds to.
    """

    def __init__(
        self, ledger: PromptLedger, journal: Journal, rules: RerollRules, watch: FailureWatch, totals: Counter[str]
    ) -> None:
        self._ledger = ledger
        self._journal = journal
        self._rules = rules
        self._watch = watch
        self._totals = totals
        self._unburied: dict[str, tuple[str, str]] = {}  # leases that a full disk keeps from ending, reason and detail

    def adopt(
        self, producer: str, lease_ids: Sequence[str], *, deadline: float, of_this_run: bool
    ) -> dict[str, bool | None]:
        """Says of each lease that a producer holds: True if it may go on, False if it is not wanted, None if its group is in
        the journal already.

        Args:
            of_this_run: False if they may be another run's, unless this process gave them.
        """
        known = self._journal.known(lease_ids)
        result: dict[str, bool | None] = dict.fromkeys(lease_ids, False) | dict.fromkeys(known)
        for name in [name for name in result if name not in known]:
            with contextlib.suppress(UnknownLeaseError):
                lease = LeaseId.parse(name)
                result[name] = self._ledger.adopt(lease, producer, deadline=deadline, of_this_run=of_this_run)
        self._totals["adopted"] += sum(bool(wanted) for wanted in result.values())
        return result

    def answered(self) -> None:
        """A prompt has its group."""
        self._watch.answered()

    def check(self) -> None:
        """
        Raises:
            DataFailuresError: too many of the last prompts were given up.
        """
        self._watch.check()

    def settle(self, key: Key) -> None:
        """The held prompt has had its group, trained or not; it may return, or sit out."""
        held = self._ledger.settle(key)
        version = self._rules.return_version(key, held.verdict, held.policy_version)
        if version is not None:
            self._totals["deferred"] += self._ledger.defer(key, version)
        until_epoch = self._rules.cooldown_until(key, held.verdict)
        if until_epoch is not None:
            self._totals["rested"] += 1
            self._ledger.cool_down(key.prompt_id, until_epoch)

    def fail(self, lease_id: str, reason: str, detail: str, now: float) -> bool | None:
        """A lease ended without a group. Returns as `PromptTable.fail`.

        Raises:
            JournalFullError: the prompt would become a dead letter, but the disk is full; the lease stays.
        """
        spent = self._ledger.leases.spent_by(lease_id, reason)
        if spent is not None:
            self._unburied.setdefault(lease_id, (reason, detail))
            self._journal.bury(DeadLetter(*spent.key, spent.attempt, failure_class(reason), reason, detail))
            self._totals["dead_letters"] += 1
            self._watch.given_up(f"{reason}: {detail}")
        self._unburied.pop(lease_id, None)
        again = self._ledger.leases.fail(lease_id, reason, now)
        self._totals[f"failed_{reason}"] += again is not None
        return again

    def expire(self, now: float) -> list[LeaseRecord[Key]]:
        """Takes back every lease whose deadline has passed. What could not end on a full disk ends now if it can."""
        overdue = self._ledger.leases.overdue(now)
        with contextlib.suppress(JournalFullError):
            for lease_id, (reason, detail) in list(self._unburied.items()):
                self.fail(lease_id, reason, detail, now)
        return self.take_back(overdue, "expired", now)

    def take_back(self, records: Sequence[LeaseRecord[Key]], reason: str, now: float) -> list[LeaseRecord[Key]]:
        """Returns the leases that ended; on a full disk the others stay, and `expire` tries again."""
        ended = []
        for record in records:
            with contextlib.suppress(JournalFullError):
                self.fail(record.lease_id, reason, f"leased to {record.producer}", now)
                ended.append(record)
        return ended

    def apply(self, recovered: Sequence[RecoveredPrompt]) -> None:
        """What the journal knows of prompts beyond the checkpoint."""
        for key, status, verdict, policy_version, is_new in recovered:
            # A reroll that went stale, and whose deferral is not known here, waits until that comes again.
            if not self._ledger.recall(key, Held(verdict, policy_version), is_new=is_new and status != "again"):
                continue
            if status == "again":
                self._ledger.requeue(key)
            elif status == "settled":
                self.settle(key)
