"""The manager of a run: it brings the daemons that there are to those that there should be.

Guarantee: it decides from what it sees at every tick and keeps nothing that a new manager would miss, but the plan and the wanted
number of producers, which are in `RUN_DIR/cluster/plan.json`. Each change is one event. When the trainer has finished, the
producers are drained and their resources given back.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from protocol.runtime.files import staged
from slipstream.cluster.fleet.events import Events
from slipstream.cluster.fleet.keys import new_key, revoke
from slipstream.cluster.fleet.loads import Looks, answers
from slipstream.cluster.fleet.plan import TRAINER, DaemonReport, FleetReport, Plan, producer_name
from slipstream.cluster.fleet.resources import Amounts, Need, missing_text, num_places
from slipstream.cluster.fleet.scaling import History, decide

FAREWELL_S = 30.0
_STRAY_S = 5.0  # for which an actor may stay silent before it is an event


class Daemons(Protocol):
    """What `slipstream.cluster.fleet.actors` does."""

    def names(self) -> set[str]: ...
    def create(self, plan: Plan, name: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def begin(self, name: str, keys: Mapping[str, bytes]) -> None: ...
    def drain(self, name: str) -> None: ...
    def reports(self) -> dict[str, DaemonReport | str]: ...
    def without_room(self) -> list[str]: ...
    def free(self) -> dict[str, Amounts]: ...


class Manager:
    """`tick` is called every second or so."""

    def __init__(
        self, daemons: Daemons, plan: Plan, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._daemons = daemons
        self._plan = plan
        self._events = events
        self._clock = clock
        self._looks = Looks()
        self._history = History()
        self._said: dict[str, str] = {}
        self._silent_since: dict[str, float] = {}
        self.report = FleetReport(plan=plan, wanted=plan.producers, daemons=[])

    def scale(self, producers: int) -> None:
        self._set(msgspec.structs.replace(self._plan, producers=producers), "as asked")

    def adopt(self, plan: Plan) -> None:
        """Goes on with another plan of the same run; what has ended is started again, what runs goes on as it is."""
        for daemon in self.report.daemons:
            if daemon.is_over:
                self._daemons.remove(daemon.name)
        self._set(plan, "as asked")

    def tick(self) -> None:
        found = self._daemons.reports()
        reports = {name: report for name, report in found.items() if isinstance(report, DaemonReport)}
        self._say_changes(found)
        wanted = self._wanted(0 if self._is_finished(reports.get(TRAINER)) else self._plan.producers)
        for name in sorted(wanted - self._daemons.names(), key=_order):
            self._daemons.create(self._plan, name)
        for name, report in reports.items():
            self._move(report, stays=name in wanted)
        lost = self._daemons.without_room()
        needs = [Need(name, self._plan.needs(name)) for name in lost]
        self.report = FleetReport(
            plan=self._plan,
            wanted=self._plan.producers,
            daemons=sorted(reports.values(), key=lambda report: _order(report.name)),
            unreachable=[f"{name}: {why}" for name, why in sorted(found.items()) if isinstance(why, str)],
            missing=missing_text(needs, self._daemons.free()) if needs else "",
        )

    def scale_by_load(self) -> None:
        """One look at the load, and a decision if the plan leaves a choice."""
        now = self._clock()
        self._looks.add(now, answers(self.report.daemons, time.time()))
        plan = self._plan
        if plan.least == plan.most:
            return
        room = num_places(plan.producer_needs, self._daemons.free(), 1) > 0
        decision = decide(self._looks.load(plan.producers, room), self._history, plan.least, plan.most)
        self._history = decision.history
        if decision.change:
            self._set(msgspec.structs.replace(plan, producers=plan.producers + decision.change), decision.why)

    def _is_finished(self, trainer: DaemonReport | None) -> bool:
        """Whether it ended well so long ago that producers have ended by themselves, unless they hang."""
        return (
            trainer is not None
            and trainer.is_over
            and trainer.exit_code == 0
            and time.time() - trainer.since > FAREWELL_S
        )

    def _wanted(self, producers: int) -> set[str]:
        return {TRAINER, *(producer_name(number) for number in range(1, producers + 1))}

    def _set(self, plan: Plan, why: str) -> None:
        if plan.producers != self._plan.producers:
            self._events.say(f"producers: {self._plan.producers} -> {plan.producers}, {why}")
        self._plan = plan
        save(plan)

    def _move(self, report: DaemonReport, *, stays: bool) -> None:
        """One step of one daemon towards where it should be."""
        name = report.name
        if not stays and report.is_over:
            self._daemons.remove(name)
            revoke(Path(self._plan.keys), name)
        elif not stays and not report.draining:
            self._daemons.drain(name)
        elif stays and report.is_over and report.draining:  # it is wanted again
            self._daemons.remove(name)
        elif stays and report.phase == "new":
            self._daemons.begin(name, {} if name == TRAINER else new_key(Path(self._plan.keys), name))

    def _say_changes(self, found: Mapping[str, DaemonReport | str]) -> None:
        now = self._clock()
        for name, report in found.items():
            if isinstance(report, DaemonReport):
                self._silent_since.pop(name, None)
                if report.phase != "new":
                    self._say(name, in_words(report))
            elif now - self._silent_since.setdefault(name, now) >= _STRAY_S:
                self._say(name, report)
        for name in self._said.keys() - found.keys():
            self._said.pop(name)
            self._events.say(f"{name}: removed")

    def _say(self, name: str, text: str) -> None:
        if self._said.get(name) != text:
            self._said[name] = text
            self._events.say(f"{name}: {text}")


def _order(name: str) -> tuple[bool, int, str]:
    """The trainer first, producers by their number."""
    return name != TRAINER, len(name), name


def in_words(report: DaemonReport) -> str:
    """What a daemon does, on one line or with its last words below."""
    match report.phase:
        case "running":
            times = f", start {report.starts}" if report.starts > 1 else ""
            return f"{'drains' if report.draining else 'runs'} on {report.node}{times}"
        case "pausing":
            return f"ended with {report.message}"
        case "ended":
            code = "" if report.exit_code is None else f" with {report.exit_code}"
            return f"ended{code}" + (f"\n{report.message}" if report.message else "")
    return report.message or report.phase


def plan_file(run_dir: str | Path) -> Path:
    return Path(run_dir) / "cluster" / "plan.json"


def save(plan: Plan) -> None:
    with staged(plan_file(plan.run_dir)) as partial:
        partial.write_bytes(msgspec.json.encode(plan))


def saved(run_dir: str | Path) -> Plan | None:
    """The plan of the run's last manager; None if there is none that this release can read."""
    try:
        return msgspec.json.decode(plan_file(run_dir).read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError):
        return None
