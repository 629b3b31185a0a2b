"""`slipstream cluster down`: ends a run in good order.

Guarantee: producers say goodbye first, so that what they have finished is journaled; then the trainer ends its step and writes a
checkpoint. What has not ended by its deadline is killed, which loses nothing that was acknowledged. Then the resources are given
back, and a Ray that `up` started is ended.
"""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.tables import write_line
from slipstream_extras.ray import session
from slipstream_extras.ray.session import Session

if TYPE_CHECKING:
    from slipstream_extras.ray.actors import Actors

_DEADLINE_S = 300
_LOOK_EVERY_S = 0.2


def take_down(place: Path, ray: Session, deadline_s: float = _DEADLINE_S) -> None:
    from slipstream_extras.ray.actors import Actors
    from slipstream_extras.ray.manager import FAREWELL_S, ManagerHandle, NoAnswer, last_backup
    from slipstream_extras.ray.plan import TRAINER

    manager, plan = ManagerHandle.find(), None
    if manager is not None:
        with contextlib.suppress(*NoAnswer):
            plan = manager.report().plan
        manager.end()
    actors = Actors()
    names = actors.names()
    farewell = time.monotonic() + (FAREWELL_S if _has_finished(actors) else 0.0)
    for some, drain_at in ((names - {TRAINER}, farewell), (names & {TRAINER}, 0.0)):
        _drain(actors, some, drain_at, time.monotonic() + deadline_s)
    if plan is not None and plan.backup:
        write_line(last_backup(plan))
    if ray.own is not None:
        session.end_own(place, ray.own)
    write_line(f"{place}: the run is down")


def _has_finished(actors: "Actors") -> bool:
    """Producers end by themselves then."""
    from slipstream_extras.ray.plan import TRAINER, DaemonReport

    trainer = actors.reports().get(TRAINER)
    return isinstance(trainer, DaemonReport) and trainer.is_over and trainer.exit_code == 0


def _drain(actors: "Actors", names: set[str], drain_at: float, until: float) -> None:
    """Wait for their end, drain them at `drain_at`, and kill the rest at `until`."""
    from slipstream_extras.ray.plan import DaemonReport

    left, told = set(names), False
    while left:
        if not told and time.monotonic() >= drain_at:
            told = True
            for name in left:
                actors.drain(name)
        for name in left.intersection(actors.without_room()):
            actors.remove(name)
            left.discard(name)
        for name, report in actors.reports().items():
            if name in left and isinstance(report, DaemonReport) and report.is_over:
                write_line(f"{name}: ended" + ("" if report.exit_code is None else f" with {report.exit_code}"))
                actors.remove(name)
                left.discard(name)
        if left and time.monotonic() > until:
            write_line(f"killed, because they had not ended by the deadline: {', '.join(sorted(left))}")
            for name in left:
                actors.kill(name)
            return
        time.sleep(_LOOK_EVERY_S)
