"""The instants at which a daemon is made to die or to stop, and the switch that does it.

Guarantee: the process gets its signal at exactly the n-th time that the named point is reached, from its own hand, so
that nothing of what follows the point happens before.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

START = ("model.loaded", "recover.begin", "recover.uncommitted", "recover.committed", "note_facts.committed")
"""Reached once by every trainer process."""
TRAINER = (
    *(f"append.{moment}" for moment in ("begin", "row", "uncommitted", "committed")),
    *(f"claim.{moment}" for moment in ("begin", "uncommitted", "committed")),
    *(f"end_step.{moment}" for moment in ("begin", "uncommitted", "committed")),
    *(f"note_policy.{moment}" for moment in ("begin", "uncommitted", "committed")),
    "ack.begin",
    "ack.queued",
    "ack.sent",
    "lease.begin",
    "lease.sent",
    "welcome.begin",
    "welcome.sent",
    "publish.begin",
    "publish.done",
    "step.begin",
    "step.loss",
)
"""Reached many times between two checkpoints, or about as often."""
CHECKPOINT = (
    "checkpoint.begin",
    "checkpoint.syncing",
    "checkpoint.synced",
    "checkpoint.renamed",
    "checkpoint.done",
    "checkpoint.pruning",
    "checkpoint.uncounted",
    "checkpoint.pruned",
)
FINISH = (
    "adapter.synced",
    "adapter.renamed",
    "adapter.aside",  # in place of the one that the death before this has left
    "farewell.begin",
    "farewell.done",
    "summary.synced",
    "summary.renamed",
)
"""Reached once, at the end of the run."""
RANKS = ("plan.begin", "plan.shared", "sum.begin", "sum.done")
"""Points of a trainer of several ranks, in rank 0: around the plan of a step, and around the sum of gradients."""
AT_RANK = (*RANKS, "claim.committed", "step.begin", "step.loss", "end_step.begin", "publish.begin", *CHECKPOINT)
"""Where rank 0 has another rank die or stop."""
EVALUATION = ("evaluation.awaited", "evaluation.begin", "evaluation.recorded")
"""Of the last version, between adapter and farewell."""
PRODUCER = (
    "hello.begin",
    "hello.sent",
    "welcome.received",
    "lease.received",
    "lease.begun",
    "policy.arrived",
    "generate.begin",
    "generate.half",
    "generate.done",
    "answer.begin",
    "answer.kept",
    "group.begin",
    "group.sent",
    "ack.received",
    "ack.settled",
)
PATCH = ("snapshot.taken", "patch.begin", "patch.made", "offer.begin", "offer.queued", "offer.sent")
"""Points of a trainer of `lora: null`, once a version: its weights are copied, compared with the checkpoint, and offered."""
ANCHOR = ("anchor.begin", "anchor.made", "patches.saved")
"""Points of it, at some versions: a patch becomes the anchor of those after it, and a checkpoint gets it."""
PATCHED = (
    "anchor.begin",
    "anchor.fetched",
    "prepare.begin",
    "prepare.read",
    "prepare.done",
    "flip.begin",
    "flip.done",
    "prove.begin",
    "prove.done",
)
"""Points of its producers, once a version."""
RETENTION = ("retention.begin", "retention.uncommitted", "retention.committed", "retention.done")

_TIME_TO_LEAVE_S = 0.03  # for a message that ZeroMQ's own thread has yet to write


class Aim:
    """At the `count`-th time that `point` is reached, the process sends `number` to `victim`, by default to itself. `point` may
    be empty."""

    def __init__(
        self, point: str = "", count: int = 1, number: int = signal.SIGKILL, *, victim: int | None = None
    ) -> None:
        self._victim = os.getpid() if victim is None else victim
        self._point = point
        self._left = count
        self._number = number
        self._mutex = threading.Lock()

    def reach(self, point: str) -> None:
        if point != self._point:
            return
        with self._mutex:
            self._left -= 1
            due = self._left == 0
        if due:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._victim, self._number)

    def reach_when_sent(self, point: str) -> None:
        """The same, once a message that was just queued has left."""
        if point == self._point:
            time.sleep(_TIME_TO_LEAVE_S)
            self.reach(point)

    def around(self, owner: Any, name: str, before: str | None, after: str | None) -> None:
        """Puts points before and after every call of `owner.name`."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.reach(before)
            result = original(*args, **kwargs)
            if after:
                self.reach(after)
            return result

        setattr(owner, name, watched)


class TransactionPoints:
    """Points around the COMMIT of whatever a named function writes to the journal."""

    def __init__(self, aim: Aim, journal: Any) -> None:
        self._aim = aim
        self._within = threading.local()
        transaction = journal.transaction
        points = self

        @contextlib.contextmanager
        def watched(journal: Any) -> Iterator[Any]:
            name = getattr(points._within, "name", None)
            with transaction(journal) as db:
                yield db
                if name:
                    points._aim.reach(f"{name}.uncommitted")
            if name:
                points._aim.reach(f"{name}.committed")

        journal.transaction = watched  # type: ignore[attr-defined]

    def name(self, owner: Any, function: str, name: str) -> None:
        """Calls what `owner.function` commits `name`."""
        original: Callable[..., Any] = getattr(owner, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._aim.reach(f"{name}.begin")
            outer, self._within.name = getattr(self._within, "name", None), name
            try:
                result = original(*args, **kwargs)
            finally:
                self._within.name = outer
            self._aim.reach(f"{name}.done")
            return result

        setattr(owner, function, watched)
