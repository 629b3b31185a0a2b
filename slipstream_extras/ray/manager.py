"""The manager of a run: it starts, ends and scales daemons until they are those that are wanted.

Guarantee: it decides from what it sees at every tick and keeps nothing that a new manager would miss, but the plan and the wanted
number of producers, which are in `RUN_DIR/cluster/plan.json`. Each change is one event. When the trainer has finished, the
producers are drained and their resources given back.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError

from protocol.errors import SlipstreamError
from protocol.runtime.files import staged
from protocol.runtime.json_lines import RotatedLines, read_end
from protocol.runtime.processes import exit_text
from slipstream.tables import printable
from slipstream_extras.ray import backups
from slipstream_extras.ray.actors import Actors
from slipstream_extras.ray.plan import (
    MANAGER,
    TRAINER,
    Amounts,
    DaemonReport,
    FleetReport,
    Need,
    Plan,
    missing_text,
    new_key,
    num_places,
    on_host,
    prepare,
    producer_name,
    revoke,
)
from slipstream_extras.ray.scaling import History, Looks, answers, decide

_MAX_BYTES = 4 * 2**20
_KEPT = 1000


class Events:
    """May be used from any thread. `file` outlives the process."""

    def __init__(self, file: Path) -> None:
        self._file = RotatedLines(file, _MAX_BYTES)
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._count = 0
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {printable(' | '.join(text.splitlines()))}"
        with self._lock:
            self._lines.append(line)
            self._count += 1
            with contextlib.suppress(OSError):  # a full disk stops no run
                self._file.append(f"{line}\n".encode())

    def since(self, number: int) -> tuple[int, list[str]]:
        """The lines after the first `number`, as far as they are kept, and how many there have been."""
        with self._lock:
            new = max(0, min(self._count - number, len(self._lines)))
            return self._count, list(self._lines)[len(self._lines) - new :]

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of the file."""
        return [line.decode(errors="replace") for line in read_end(self._file.path, _MAX_BYTES)][-count:]


FAREWELL_S = 30.0
_STRAY_S = 5.0  # for which an actor may stay silent before it is an event


class Daemons(Protocol):
    """The part of `Actors` that the manager uses."""

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
        self._running: dict[str, int] = {}  # the starts of those that ran at the tick before
        self._silent_since: dict[str, float] = {}
        self.report = FleetReport(plan=plan, wanted=plan.producers, daemons=[])

    def scale(self, producers: int) -> None:
        self._set(msgspec.structs.replace(self._plan, producers=producers), "as asked")

    def adopt(self, plan: Plan) -> None:
        """Go on with another plan of the same run; what has ended is started again, what runs goes on as it is."""
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
        """Measure the load, and decide if the plan leaves a choice."""
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
        """Return whether the trainer ended well so long ago that producers have ended by themselves, unless they hang."""
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
            self._events.add(f"producers: {self._plan.producers} -> {plan.producers}, {why}")
        self._plan = plan
        save(plan)

    def _move(self, report: DaemonReport, *, stays: bool) -> None:
        """Bring one daemon one step towards its wanted state."""
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
                before = self._running.pop(name, None)
                if report.phase == "running":
                    self._running[name] = report.starts
                    if before is not None and report.starts > before:  # between two ticks
                        self._say(name, f"ended with {exit_text(report.exit_code or 0)}; has started again")
                if report.phase != "new":
                    self._say(name, in_words(report))
            elif now - self._silent_since.setdefault(name, now) >= _STRAY_S:
                self._say(name, report)
        for name in self._said.keys() - found.keys():
            self._said.pop(name)
            self._running.pop(name, None)
            self._events.add(f"{name}: removed")

    def _say(self, name: str, text: str) -> None:
        if self._said.get(name) != text:
            self._said[name] = text
            self._events.add(f"{name}: {text}")


def _order(name: str) -> tuple[bool, int, str]:
    """The trainer first, producers by their number."""
    return name != TRAINER, len(name), name


def in_words(report: DaemonReport) -> str:
    """Describe a daemon on one line, with its last words below."""
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
    """The plan of the run's last manager; None if there is none that can be read."""
    try:
        return msgspec.json.decode(plan_file(run_dir).read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError):
        return None


_TICK_S, _TICKS_PER_LOOK = 0.5, 10
_ANSWER_S = 10.0


class ManagerActor:
    """Methods give plain values and JSON."""

    def __init__(self, plan: bytes) -> None:
        given = msgspec.json.decode(plan, type=Plan)
        was_lost = ray.get_runtime_context().was_current_actor_reconstructed
        kept = (saved(given.run_dir) if was_lost else None) or given
        (Path(kept.run_dir) / "cluster").mkdir(parents=True, exist_ok=True)
        save(kept)
        prepare(Path(kept.keys))
        self._events = Events(Path(kept.run_dir) / "cluster" / "events.log")
        self._manager = Manager(Actors(), kept, self._events)
        self._lock = threading.Lock()
        backups.start(kept.run_dir, lambda: self._manager.report.plan.backup, self._events.add)
        threading.Thread(target=self._run, name="manager", daemon=True).start()

    def report(self) -> bytes:
        """A `FleetReport` as JSON."""
        return msgspec.json.encode(self._manager.report)

    def events(self, after: int) -> tuple[int, list[str]]:
        return self._events.since(after)

    def last_lines(self, count: int) -> list[str]:
        return self._events.last_lines(count)

    def scale(self, producers: int) -> None:
        with self._lock:
            self._manager.scale(producers)

    def adopt(self, plan: bytes) -> None:
        with self._lock:
            self._manager.adopt(msgspec.json.decode(plan, type=Plan))

    def _run(self) -> None:
        tick = 0
        failure = ""
        while True:
            try:
                with self._lock:
                    self._manager.tick()
                    if tick % _TICKS_PER_LOOK == 0:
                        self._manager.scale_by_load()
                failure = ""
            except (RayError, SlipstreamError, OSError, ValueError) as error:  # the next tick sees anew what there is
                if failure != (failure := f"manager: {type(error).__name__}: {error}"):
                    self._events.add(failure)
            tick += 1
            time.sleep(_TICK_S)


class ManagerHandle:
    """The manager as `slipstream cluster` sees it. Every method raises `RayError` if it does not answer."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def find(cls) -> "ManagerHandle | None":
        try:
            return cls(ray.get_actor(MANAGER))
        except ValueError:
            return None

    @classmethod
    def start(cls, plan: Plan) -> "ManagerHandle":
        options = {"lifetime": "detached", "max_restarts": -1, "max_concurrency": 8, "num_cpus": 0}
        actor = ray.remote(ManagerActor).options(name=MANAGER, resources=on_host(plan.host), **options)
        return cls(actor.remote(msgspec.json.encode(plan)))

    def report(self, timeout_s: float = _ANSWER_S) -> FleetReport:
        return msgspec.json.decode(ray.get(self._actor.report.remote(), timeout=timeout_s), type=FleetReport)

    def events(self, after: int) -> tuple[int, list[str]]:
        count, lines = ray.get(self._actor.events.remote(after), timeout=_ANSWER_S)
        return int(count), list(lines)

    def last_lines(self, count: int) -> list[str]:
        return list(ray.get(self._actor.last_lines.remote(count), timeout=_ANSWER_S))

    def scale(self, producers: int) -> None:
        ray.get(self._actor.scale.remote(producers), timeout=_ANSWER_S)

    def adopt(self, plan: Plan) -> None:
        ray.get(self._actor.adopt.remote(msgspec.json.encode(plan)), timeout=_ANSWER_S)

    def end(self) -> None:
        ray.kill(self._actor)


NoAnswer = (GetTimeoutError, RayError)


def last_line(error: Exception) -> str:
    """Return the end of a long error of Ray's: the error that was raised in the actor."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300]


def last_backup(plan: Plan) -> str:
    """Back up a run that has ended, on its node; return the outcome in words."""
    make = ray.remote(backups.back_up).options(num_cpus=0, resources=on_host(plan.host), max_retries=0)
    try:
        return str(ray.get(make.remote(plan.run_dir, plan.backup)))
    except RayError as error:
        return f"no backup: {error}"
