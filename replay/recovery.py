"""What the journal says to a trainer that starts at a checkpoint.

Guarantee: after `recover`, every accepted group is in exactly one place: trained by the steps up to the checkpoint,
in a recorded batch of a step after it, ready, or dropped with a reason. Steps after the checkpoint are cut again exactly
as they were, so that the surviving run is the run that would have been; from the first step that cannot be (a group of it
is quarantined, or the batch has another size or would be too stale now) all later ones are cut anew, in the order in
which groups arrived.
"""

from dataclasses import dataclass, field
from typing import Literal

from replay.journal import MAX_TRIES, Journal
from replay.staleness import StalenessBudget

Key = tuple[int, int]
Fate = Literal["held", "settled", "again"]

_AVAILABLE = "outcome = 'accepted' AND dropped IS NULL AND (last_step IS NULL OR last_step > :step)"
_END_BEGUN = f"UPDATE groups SET last_step = :step WHERE {_AVAILABLE} AND step <= :step"
"""What was trained in part stays trained as far as that."""


@dataclass(frozen=True)
class RecordedBatch:
    """Groups of the optimizer steps `step` to `last_step` (from 1), in order."""

    step: int
    last_step: int
    group_ids: list[str]


@dataclass
class Recovery:
    """What comes back."""

    batches: list[RecordedBatch] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)  # group ids in order of arrival
    keys: dict[str, Key] = field(default_factory=dict)  # of all groups above
    fates: list[tuple[Key, Fate]] = field(default_factory=list)  # of every prompt that the checkpoint may not know of
    outcomes: dict[str, int] = field(default_factory=dict)  # how many of each the checkpoint does not know of
    quarantined: int = 0


def recover(journal: Journal, step: int, since_seq: int, budget: StalenessBudget, *, comparable: bool) -> Recovery:
    """Makes available again what was consumed after `step`.

    Args:
        step: optimizer steps that the checkpoint has taken; 0 without one.
        since_seq: the newest row that the checkpoint's ledger knows.
        budget: of the run as it is configured now.
        comparable: False when groups must look different now; those available are then dropped.
    """
    quarantined = _drop_unusable(journal, step, comparable)
    result = Recovery(quarantined=quarantined)
    rows = journal.query(
        "SELECT group_id, epoch, prompt_id, step, last_step, policy_version FROM groups"
        f" WHERE {_AVAILABLE} ORDER BY step IS NULL, step, position, seq",
        {"step": step},
    )
    claimed: dict[tuple[int, int], list[str]] = {}
    oldest: dict[tuple[int, int], int] = {}
    for group_id, epoch, prompt_id, first, last, version in rows:
        result.keys[group_id] = (epoch, prompt_id)
        if first is not None:
            claimed.setdefault((first, last), []).append(group_id)
            oldest[first, last] = min(version, oldest.get((first, last), version))
    expected = step + 1
    for (first, last), group_ids in claimed.items():
        begun = first <= step  # some iterations over this batch are in the checkpoint
        fits = (
            len(group_ids) == budget.groups_per_step
            and last - first + 1 == budget.num_iterations
            and oldest[first, last] >= budget.oldest_usable(first - 1)
        )
        if not fits or (first != expected and not begun):
            break
        result.batches.append(RecordedBatch(first, last, group_ids))
        expected = last + 1
    _release_the_rest(journal, step, expected, result)
    recorded = {group_id for batch in result.batches for group_id in batch.group_ids}
    result.ready = [
        group_id
        for (group_id,) in journal.query(f"SELECT group_id FROM groups WHERE {_AVAILABLE} ORDER BY seq", {"step": step})
        if group_id not in recorded
    ]
    result.keys = {group_id: result.keys[group_id] for group_id in [*recorded, *result.ready]}
    result.fates = _fates(journal, step, since_seq)
    result.outcomes = dict(
        journal.query("SELECT outcome, count(*) FROM groups WHERE seq > ? GROUP BY outcome", (since_seq,))
    )
    return result


def _drop_unusable(journal: Journal, step: int, comparable: bool) -> int:
    with journal.transaction() as db:
        db.execute(
            "UPDATE groups SET dropped = 'quarantined', last_step = iif(step <= :step, :step, last_step)"
            f" WHERE {_AVAILABLE} AND tries >= :tries",
            {"step": step, "tries": MAX_TRIES},
        )
        quarantined = int(db.changes())
        if not comparable:
            db.execute(_END_BEGUN, {"step": step})
            db.execute(f"UPDATE groups SET dropped = 'configuration' WHERE {_AVAILABLE}", {"step": step})
    return quarantined


def _release_the_rest(journal: Journal, step: int, from_step: int, result: Recovery) -> None:
    """Takes back the claims of steps that will be cut anew."""
    begun = [batch for batch in result.batches if batch.step <= step]
    with journal.transaction() as db:
        if not begun:
            db.execute(_END_BEGUN, {"step": step})
        db.execute(
            f"UPDATE groups SET step = NULL, last_step = NULL, position = NULL WHERE {_AVAILABLE} AND step >= :from_step",
            {"step": step, "from_step": from_step},
        )


def _fates(journal: Journal, step: int, since_seq: int) -> list[tuple[Key, Fate]]:
    """In order of arrival, later ones override earlier ones."""
    rows = journal.query(
        "SELECT epoch, prompt_id, CASE"
        f" WHEN {_AVAILABLE} THEN 'held'"
        " WHEN outcome = 'stale' OR dropped IN ('stale', 'configuration') THEN 'again'"
        " ELSE 'settled' END FROM groups"
        f" WHERE seq > :seq OR dropped = 'quarantined' OR {_AVAILABLE} ORDER BY seq",
        {"step": step, "seq": since_seq},
    )
    fates: list[tuple[Key, Fate]] = [((epoch, prompt_id), fate) for epoch, prompt_id, fate in rows]
    buried = journal.query("SELECT epoch, prompt_id FROM dead_letters ORDER BY id")
    return fates + [((epoch, prompt_id), "settled") for epoch, prompt_id in buried]
