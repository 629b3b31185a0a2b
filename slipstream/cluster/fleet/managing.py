"""The Ray actor of the manager, and how others reach it.

Guarantee: it is on the trainer's node, takes none of its resources, and comes back with that node, with the plan that it had.
"""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError

from protocol.errors import SlipstreamError
from slipstream.cluster.fleet import backups
from slipstream.cluster.fleet.actors import Actors
from slipstream.cluster.fleet.events import Events
from slipstream.cluster.fleet.keys import prepare
from slipstream.cluster.fleet.manager import Manager, save, saved
from slipstream.cluster.fleet.plan import MANAGER, FleetReport, Plan, on_host

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
        backups.start(kept.run_dir, lambda: self._manager.report.plan.backup, self._events.say)
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
                    self._events.say(failure)
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
    """What a long error of Ray's ends with: what was raised in the actor."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300]


def last_backup(plan: Plan) -> str:
    """Of a run that has ended, on its node; what came of it, in words."""
    make = ray.remote(backups.back_up).options(num_cpus=0, resources=on_host(plan.host), max_retries=0)
    try:
        return str(ray.get(make.remote(plan.run_dir, plan.backup)))
    except RayError as error:
        return f"no backup: {error}"
