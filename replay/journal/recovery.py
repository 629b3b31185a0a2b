"""Recovery: the journal's part of a start at a checkpoint.

Guarantee: after `recover`, every accepted group is in exactly one place: trained by the steps up to the checkpoint,
in a recorded batch of a step after it, ready, or dropped with a reason. Steps after the checkpoint get the same batches again, so
that the surviving run is the run that would have been. From the first batch that does not fit any more (a group of it is
quarantined, it has another size, or it would be too stale now) all later batches are selected anew, in order of arrival.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import apsw

from replay.journal.schema import MAX_TRIES, RecordedBatch
from replay.journal.writer import Journal
from replay.lease_ids import Key
from replay.rerolls import attempt_counts
from replay.signal_chances import GradedGroup
from replay.sources import ONE, Sources
from replay.staleness import StalenessBudget

_AVAILABLE = "outcome = 'accepted' AND dropped IS NULL AND (last_step IS NULL OR last_step > :step)"
_END_BEGUN = f"UPDATE groups SET last_step = :step WHERE {_AVAILABLE} AND step <= :step"
"""What was trained in part stays trained as far as that."""


class RecoveredPrompt(NamedTuple):
    """The fate of a prompt, by the newest group of one of its attempts."""

    key: Key
    status: Literal["held", "settled", "again"]
    verdict: str
    policy_version: int
    is_new: bool  # the checkpoint may know nothing of it


@dataclass
class Recovery:
    """The batches, groups and prompts that come back."""

    batches: list[RecordedBatch] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)  # numbers as answers by group id, in order of arrival
    prompts: list[RecoveredPrompt] = field(default_factory=list)  # of every prompt that the checkpoint may not know of
    graded: list[GradedGroup] = field(default_factory=list)  # that the checkpoint does not know of, in order of arrival
    counts: dict[str, int] = field(default_factory=dict)  # of what the checkpoint does not know of
    quarantined: int = 0
    not_replayable: set[str] = field(default_factory=set)  # group ids


def recover(
    journal: Journal,
    step: int,
    since_seq: int,
    budget: StalenessBudget,
    *,
    smaller: bool,
    comparable: bool,
    sources: Sources = ONE,
) -> Recovery:
    """Make available again what was consumed after `step`, the steps that the checkpoint has taken, whose ledger knows the
    rows up to `since_seq`. With `smaller` batches may have fewer than `groups_per_step`. If not `comparable`, groups must
    look different now, and those available are dropped."""
    with journal.transaction() as db:
        broken, quarantined = _drop_unusable(db, step, comparable)
        batches = _recorded(db, step, budget, smaller, broken)
        _release_the_rest(db, step, batches)
    recorded = {lease_id for batch in batches for lease_id in batch.lease_ids}
    ready = journal.query(f"SELECT lease_id, answer FROM groups WHERE {_AVAILABLE} ORDER BY seq", {"step": step})
    unfit = journal.query("SELECT lease_id FROM groups WHERE NOT replayable OR dropped IS NOT NULL")
    return Recovery(
        batches=batches,
        ready={lease_id: number for lease_id, number in ready if lease_id not in recorded},
        prompts=_prompts(journal, step, since_seq),
        graded=_graded(journal, since_seq),
        counts=_counts(journal, since_seq) | _counts_by_source(journal, since_seq, sources),
        quarantined=quarantined,
        not_replayable={lease_id for (lease_id,) in unfit},
    )


def _drop_unusable(db: apsw.Connection, step: int, comparable: bool) -> tuple[set[int], int]:
    """The first steps of the batches that are not whole any more, and the number of groups in quarantine now."""
    killers = f"{_AVAILABLE} AND tries >= :tries"
    bindings = {"step": step, "tries": MAX_TRIES}
    broken = {first for (first,) in db.execute(f"SELECT DISTINCT step FROM groups WHERE {killers}", bindings)}
    db.execute(
        f"UPDATE groups SET dropped = 'quarantined', last_step = iif(step <= :step, :step, last_step) WHERE {killers}",
        bindings,
    )
    quarantined = int(db.changes())
    db.execute(
        "UPDATE groups SET replayable = 0 WHERE lease_id IN"
        " (SELECT lease_id FROM replays WHERE last_step > :step AND tries >= :tries)",
        bindings,
    )
    if not comparable:
        db.execute(_END_BEGUN, {"step": step})
        db.execute(f"UPDATE groups SET dropped = 'configuration' WHERE {_AVAILABLE}", {"step": step})
    return broken, quarantined


def _recorded(
    db: apsw.Connection, step: int, budget: StalenessBudget, smaller: bool, broken: set[int]
) -> list[RecordedBatch]:
    """Return the batches after `step` that can be trained again unchanged, up to the first that cannot."""
    claimed: dict[tuple[int, int], list[str]] = {}
    oldest: dict[tuple[int, int], int] = {}
    last_answers: dict[tuple[int, int], int] = {}
    for lease_id, first, last, version, last_answer in db.execute(
        f"SELECT lease_id, step, last_step, policy_version, last_answer FROM groups WHERE {_AVAILABLE} AND step IS NOT NULL"
        " ORDER BY step, position",
        {"step": step},
    ):
        claimed.setdefault((first, last), []).append(lease_id)
        last_answers[first, last] = last_answer
        oldest[first, last] = min(version, oldest.get((first, last), version))
    result: list[RecordedBatch] = []
    expected = step + 1
    for (first, last), fresh in claimed.items():
        begun = first <= step  # some iterations over this batch are in the checkpoint
        again = [g for (g,) in db.execute("SELECT lease_id FROM replays WHERE step = ? ORDER BY position", (first,))]
        size = len(fresh) + len(again)
        fits = (
            first not in broken
            and (size == budget.groups_per_step or (smaller and size < budget.groups_per_step))
            and last - first + 1 == budget.num_iterations
            and oldest[first, last] >= budget.oldest_usable(first - 1)
        )
        if not fits or (first != expected and not begun):
            break
        result.append(RecordedBatch(first, last, fresh + again, len(fresh), last_answers[first, last]))
        expected = last + 1
    return result


def _release_the_rest(db: apsw.Connection, step: int, batches: list[RecordedBatch]) -> None:
    """Take back the claims of steps whose batches will be selected anew."""
    from_step = batches[-1].last_step + 1 if batches else step + 1
    if not any(batch.step <= step for batch in batches):
        db.execute(_END_BEGUN, {"step": step})
        db.execute("UPDATE replays SET last_step = :step WHERE step <= :step AND last_step > :step", {"step": step})
    db.execute("DELETE FROM replays WHERE step >= ?", (from_step,))
    db.execute(
        "UPDATE groups SET step = NULL, last_step = NULL, position = NULL, last_answer = NULL"
        f" WHERE {_AVAILABLE} AND step >= :from_step",
        {"step": step, "from_step": from_step},
    )


def _prompts(journal: Journal, step: int, since_seq: int) -> list[RecoveredPrompt]:
    """Return prompts in order of arrival; later ones override earlier ones."""
    rows = journal.query(
        "SELECT epoch, prompt_id, reroll, CASE"
        f" WHEN {_AVAILABLE} THEN 'held'"
        " WHEN outcome = 'stale' OR dropped IN ('stale', 'configuration') THEN 'again'"
        " ELSE 'settled' END, verdict, policy_version, seq > :seq FROM groups"
        f" WHERE seq > :seq OR dropped = 'quarantined' OR {_AVAILABLE} ORDER BY seq",
        {"step": step, "seq": since_seq},
    )
    found = [
        RecoveredPrompt(Key(epoch, prompt_id, reroll), status, verdict, version, bool(is_new))
        for epoch, prompt_id, reroll, status, verdict, version, is_new in rows
    ]
    buried = journal.query("SELECT epoch, prompt_id, reroll FROM dead_letters ORDER BY id")
    return found + [RecoveredPrompt(Key(*numbers), "settled", "unscored", 0, True) for numbers in buried]


def _graded(journal: Journal, since_seq: int) -> list[GradedGroup]:
    rows = journal.query(
        "SELECT prompt_id, verdict, outcome = 'accepted', policy_version, num_scored, num_successes, reroll FROM groups"
        " WHERE seq > ? AND outcome != 'stale' ORDER BY seq",
        (since_seq,),
    )
    return [GradedGroup(prompt_id, verdict, bool(signal), *numbers) for prompt_id, verdict, signal, *numbers in rows]


def _counts(journal: Journal, since_seq: int) -> dict[str, int]:
    outcomes = journal.query("SELECT outcome, count(*) FROM groups WHERE seq > ? GROUP BY outcome", (since_seq,))
    result = dict(outcomes)
    for reroll, *numbers in journal.query(
        "SELECT reroll, count(*), sum(num_scored), sum(num_successes) FROM groups"
        " WHERE seq > ? AND outcome != 'stale' GROUP BY reroll",
        (since_seq,),
    ):
        result |= zip(attempt_counts(reroll), numbers, strict=True)
    return result


def _counts_by_source(journal: Journal, since_seq: int, sources: Sources) -> dict[str, int]:
    found = Counter[str]()
    if any(sources.parts):
        rows = "SELECT prompt_id, outcome, count(*) FROM groups WHERE seq > ? GROUP BY prompt_id, outcome"
        for prompt_id, outcome, count in journal.query(rows, (since_seq,)):
            sources.count(found, outcome, [prompt_id], count)
    return found
