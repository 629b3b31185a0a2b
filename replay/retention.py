"""How much of the past the journal keeps.

Guarantee: a row goes only when no checkpoint that can be resumed from needs it; of the others the newest stay, up to so
many bytes and so long. The file gives freed pages back to the disk.
"""

import time
from collections.abc import Set

from replay.journal import Journal

_ROWS_PER_TRANSACTION = 256  # so that an acknowledgement never waits long for a deletion
_PAGES_PER_TRANSACTION = 1024
_MAX_DEAD_LETTERS = 100_000
_SETTLED = """
seq <= :seq AND NOT (
    outcome = 'accepted' AND (dropped IS NULL OR dropped = 'quarantined') AND (last_step IS NULL OR last_step > :step)
)"""  # without the row of a quarantined group, an older checkpoint would send its prompt out again


def prune(
    journal: Journal, *, oldest_step: int, oldest_seq: int, replayable: Set[str], keep_bytes: int, keep_age_s: float
) -> int:
    """Deletes what is neither needed nor kept for inspection, and returns the number of groups.

    Args:
        oldest_step: optimizer steps in the oldest checkpoint that can be resumed from.
        oldest_seq: the newest row that its ledger knows.
        replayable: groups in the replay table of any such checkpoint, or of the run as it is now.
    """
    needed = {"step": oldest_step, "seq": oldest_seq}
    doomed: list[tuple[int]] = []
    kept_bytes, too_old = 0, time.time() - keep_age_s
    for seq, group_id, num_bytes, accepted_at in journal.query(
        f"SELECT seq, group_id, num_bytes, accepted_at FROM groups WHERE {_SETTLED} ORDER BY seq DESC", needed
    ):
        kept_bytes += num_bytes
        if (kept_bytes > keep_bytes or accepted_at < too_old) and group_id not in replayable:
            doomed.append((seq,))
    for start in range(0, len(doomed), _ROWS_PER_TRANSACTION):
        with journal.transaction() as db:
            page = doomed[start : start + _ROWS_PER_TRANSACTION]
            of_it = "group_id = (SELECT group_id FROM groups WHERE seq = ?)"
            db.executemany(f"DELETE FROM replays WHERE {of_it}", page)
            for table in ("bodies", "groups"):
                db.executemany(f"DELETE FROM {table} WHERE seq = ?", page)
    with journal.transaction() as db:
        db.execute("DELETE FROM dead_letters WHERE id <= (SELECT max(id) FROM dead_letters) - ?", (_MAX_DEAD_LETTERS,))
    while journal.query("PRAGMA freelist_count")[0][0] > 0:
        journal.query(f"PRAGMA incremental_vacuum({_PAGES_PER_TRANSACTION})")
    return len(doomed)
