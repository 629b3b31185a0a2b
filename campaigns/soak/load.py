"""What a soak does: two runs side by side, whose daemons stay, come and go, and samples of all of them.

Guarantee: a daemon that ends in any other way than it was told to ends the soak with its log. When `run` returns, and when it
raises, nothing that it started runs any more; what daemons had lost until then is in `Record.left`.
"""

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from campaigns.chaos.fleet import Daemon, Role, Zygote, zygotes
from campaigns.soak import samples
from campaigns.soak.clients import Clients
from campaigns.soak.leaks import PLANTED
from campaigns.soak.run_folder import RunFolder, prepare
from campaigns.soak.samples import Lifetime

_TICK_S = 0.1
_END_S = 60.0
_SAY_EVERY_S = 30.0
_SETTLED_S = 20.0  # after the last daemon: what it killed is gone by then


class SoakError(AssertionError):
    """A daemon did what no daemon may do, or the load was none."""


@dataclass(frozen=True)
class Plan:
    """How long everything takes. `plant` puts leaks into a producer that stays."""

    duration_s: float
    seed: int = 1
    plant: bool = False

    @property
    def sample_every_s(self) -> float:
        return min(10.0, self.duration_s / 72)

    @property
    def warm_up_s(self) -> float:
        """Of each lifetime: caches fill, pools of threads reach their size, bounds of the journal are met."""
        return max(12.0, self.duration_s / 6)

    @property
    def visit_s(self) -> float:
        """Of a producer that comes and goes."""
        return max(12.0, self.duration_s / 12)

    @property
    def trainer_s(self) -> float:
        """Between two starts of a trainer that is restarted."""
        return self.duration_s / 3


@dataclass
class Place:
    """Of one daemon after the other."""

    run: RunFolder
    role: Role
    name: str
    stays_s: float | None  # None: to the end
    pause_s: float = 0.0
    plants: bool = False
    starts: int = 0
    due_at: float = 0.0
    told: int | None = None  # the signal that it was to end by
    told_at: float = 0.0
    daemon: Daemon | None = None
    lifetime: Lifetime | None = None


@dataclass
class Record:
    """What was seen."""

    daemons: list[Lifetime] = field(default_factory=list)
    runs: list[Lifetime] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)  # by daemons that had ended


class Load:
    """
    Args:
        zygotes: that have imported the daemons' libraries; None: of its own. It takes longer, and finds also lost processes that
            are mere forks.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        say: Callable[[str], None] = lambda text: None,
        zygotes: Mapping[Role, Zygote] | None = None,
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._say = say
        self._random = random.Random(plan.seed)
        self._temporary = folder / "tmp"
        self._logs = folder / "logs"
        self._zygotes = zygotes
        self._places: list[Place] = []
        self._killed: dict[Path, float] = {}  # scratch folders of daemons that got SIGKILL, and when
        self.record = Record()

    def run(self) -> Record:
        for folder in (self._temporary, self._logs):
            folder.mkdir()
        runs = prepare(self._folder, self._plan.seed)
        self._places = [place for run in runs for place in self._places_of(run)]
        try:
            own = zygotes("campaigns.soak", self._logs, self._temporary)
            with nullcontext(self._zygotes) if self._zygotes else own as self._zygotes:
                self.record.runs = [Lifetime(run.name, time.monotonic()) for run in runs]
                with Clients(runs, self._plan.seed) as clients:
                    self._hold(runs, clients)
                self.record.did.update(clients.counts)
                for run in runs:
                    self.record.did.update(samples.done_in(run.run_dir))
                self._end_all()
            self._look_for_left()
        finally:
            self._clear()
        return self.record

    def _places_of(self, run: RunFolder) -> list[Place]:
        plan = self._plan
        trainer_s = plan.trainer_s if run.has_agents else None
        return [
            Place(run, "trainer", f"{run.name}: trainer", trainer_s),
            Place(run, "producer", f"{run.name}: producer", None, plants=plan.plant and run.has_agents),
            Place(run, "producer", f"{run.name}: visitor", plan.visit_s, pause_s=plan.visit_s / 5),
        ]

    def _hold(self, runs: list[RunFolder], clients: Clients) -> None:
        started = time.monotonic()
        sample_at = say_at = started
        while (now := time.monotonic()) < started + self._plan.duration_s:
            for place in self._places:
                self._look_at(place, now)
            if now >= sample_at:
                sample_at = max(now, sample_at + self._plan.sample_every_s)
                self._sample(runs)
            if now >= say_at:
                say_at = now + _SAY_EVERY_S
                did = sum(clients.counts.values())
                self._say(f"{now - started:.0f} of {self._plan.duration_s:.0f} s, {did} requests of clients and agents")
            time.sleep(_TICK_S)

    def _look_at(self, place: Place, now: float) -> None:
        if place.daemon is None:
            if now >= place.due_at:
                self._start(place)
            return
        status = place.daemon.poll()
        if status is not None:
            if place.told is None or status not in (0, -place.told):
                raise SoakError(f"{place.name} ended with {status}:\n{place.daemon.tail()}")
            if place.told == signal.SIGKILL and place.lifetime is not None:
                self._killed |= dict.fromkeys(place.lifetime.folders, place.told_at)
            place.daemon, place.due_at = None, now + place.pause_s
        elif place.told is None and place.stays_s is not None and now - place.daemon.started_at > place.stays_s:
            self._tell(place, self._random.choice((signal.SIGTERM, signal.SIGKILL)))
        elif place.told is not None and now - place.told_at > _END_S:
            raise SoakError(f"{place.name} did not end within {_END_S:.0f} s:\n{place.daemon.tail()}")

    def _start(self, place: Place) -> None:
        arguments = [f"rl-{place.role}", "--gpu", "cpu", "--config", str(place.run.config_file)]
        options: dict[str, Any] = {"seed": 100 * self._plan.seed + len(self.record.daemons), "plant": place.plants}
        options |= {"child": f"campaigns.soak.{place.role}_child", "environment": {"TMPDIR": str(self._temporary)}}
        if place.role == "trainer":
            arguments.append("--resume")
        place.starts += 1
        log = self._logs / f"{place.name.replace(': ', '-')}-{place.starts:04}.log"
        assert self._zygotes is not None
        place.daemon = self._zygotes[place.role].start(arguments, log=log, **options)
        place.told = None
        place.lifetime = Lifetime(f"{place.name} {place.starts}", time.monotonic())
        self.record.daemons.append(place.lifetime)
        self.record.did[f"started: {place.name}"] += 1

    def _tell(self, place: Place, number: int) -> None:
        assert place.daemon is not None
        place.told, place.told_at = number, time.monotonic()
        self.record.did[f"ended by {signal.Signals(number).name}: {place.name}"] += 1
        place.daemon.send(number)

    def _sample(self, runs: list[RunFolder]) -> None:
        groups = {run.name: samples.groups_by_process(run.run_dir) for run in runs}
        for place in self._places:
            if place.daemon is None or place.lifetime is None or place.told is not None:
                continue
            found = samples.of_process(place.daemon.pid)
            if found is not None:
                seen = groups[place.run.name].get(place.daemon.pid, float("nan"))
                place.lifetime.add(time.monotonic(), found | {samples.GROUPS: seen})
                place.lifetime.folders |= samples.scratch_of(place.daemon.pid)
        for run, lifetime in zip(runs, self.record.runs, strict=True):
            lifetime.add(time.monotonic(), samples.of_run(run.run_dir))

    def _end_all(self) -> None:
        for place in self._places:
            if place.daemon is not None and place.told is None:
                self._tell(place, signal.SIGTERM)
        while any(place.daemon is not None for place in self._places):
            for place in self._places:
                if place.daemon is not None:
                    self._look_at(place, time.monotonic())
            time.sleep(_TICK_S)

    def _look_for_left(self) -> None:
        """What daemons left that had ended; folders of killed ones are the next daemon's to remove, if there was one."""
        deadline = time.monotonic() + _SETTLED_S
        while (left := self._commands()) - {PLANTED} and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        self.record.left += [f"process: {' '.join(command)[:200]}" for command in sorted(left)]
        daemons = self.record.daemons
        for folder in sorted({folder for lifetime in daemons for folder in lifetime.folders if folder.exists()}):
            beside = [each for each in daemons if folder.parent in {other.parent for other in each.folders}]
            killed_at = self._killed.get(folder)
            if killed_at is None or any(each.started_at > killed_at for each in beside):
                self.record.left.append(f"folder: {folder}")

    def _commands(self) -> set[tuple[str, ...]]:
        """Return the commands of all that still runs."""
        found = set()
        for process in samples.processes_with(self._temporary):
            with suppress(psutil.Error):  # it has ended since
                found.add(tuple(process.cmdline()))
        return found

    def _clear(self) -> None:
        for place in self._places:
            if place.daemon is not None:
                place.daemon.send(signal.SIGKILL)
        for process in samples.processes_with(self._temporary):
            with suppress(psutil.Error):  # it has ended since
                process.kill()
        for folder in {folder for lifetime in self.record.daemons for folder in lifetime.folders}:
            shutil.rmtree(folder, ignore_errors=True)
