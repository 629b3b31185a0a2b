"""Trainers with a defect put in, to see that the checker finds it.

Guarantee: each breaks one promise and nothing else: `ack-before-commit` acknowledges groups before they are on the disk,
`train-twice` trains a group again in the place of another.
"""

import time
from collections.abc import Callable
from typing import Any

_HELD_BACK_S = 0.2
"""Longer than from an acknowledgement to the kill that is aimed at it."""


def acknowledge_before_commit() -> None:
    """Rows wait in memory until the next ones come, or until the journal is asked for anything but whether it knows a group,
    and then for so long that whoever was acknowledged has heard of it."""
    from replay.journal.writer import Journal

    append, known = Journal.append, Journal.known
    waiting: list[Any] = []
    since = [0.0]

    def flush(journal: Any) -> None:
        if waiting:
            entries = waiting.copy()
            waiting.clear()
            append(journal, entries)

    def late_append(journal: Any, entries: Any) -> None:
        flush(journal)
        waiting.extend(entries)
        since[0] = time.monotonic()

    def late_known(journal: Any, lease_ids: Any) -> Any:
        asked = list(lease_ids)
        return known(journal, asked) | {entry.lease_id for entry in waiting if entry.lease_id in asked}

    def flushing(then: Callable[..., Any]) -> Callable[..., Any]:
        def call(journal: Any, *args: Any, **kwargs: Any) -> Any:
            while waiting and (wait_s := since[0] + _HELD_BACK_S - time.monotonic()) > 0:
                time.sleep(wait_s)
            flush(journal)
            return then(journal, *args, **kwargs)

        return call

    Journal.append, Journal.known = late_append, late_known
    for name in ("claim", "drop", "end_step", "note_policy", "frames"):
        setattr(Journal, name, flushing(getattr(Journal, name)))
    Journal.last_seq = property(flushing(vars(Journal)["last_seq"].fget))


def train_twice() -> None:
    """Every fifth batch has a group of the batch before in the place of one of its own."""
    from replay.buffer import RolloutBuffer

    next_batch = RolloutBuffer.next_batch
    previous: list[Any] = []

    def changed(buffer: Any, timeout_s: float, **options: Any) -> Any:
        batch = next_batch(buffer, timeout_s, **options)
        if batch is None:
            return None
        if previous and batch.first_step % 5 == 0:
            batch = batch._replace(groups=[previous[0], *batch.groups[1:]])
        previous[:] = batch.groups
        return batch

    RolloutBuffer.next_batch = changed  # type: ignore[method-assign]


CONTROLS: dict[str, Callable[[], None]] = {
    "ack-before-commit": acknowledge_before_commit,
    "train-twice": train_twice,
}
