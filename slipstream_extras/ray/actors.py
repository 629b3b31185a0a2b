"""The named actors of one run, with a placement group for each.

Guarantee: every process that has connected to Ray in the run's namespace finds the same ones. No call waits for an actor that
does not answer, and at most one question to each is open. Nothing here decides anything.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream_extras.ray.daemon import Daemon
from slipstream_extras.ray.plan import MANAGER, Amounts, DaemonReport, Plan

_ANSWER_S = 2.0
_FOREVER = {"lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}


class Actors:
    """The actors of the daemons; the manager is not among them."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}

    def names(self) -> set[str]:
        return set(ray.util.list_named_actors()) - {MANAGER}

    def create(self, plan: Plan, name: str) -> None:
        """Return before it has a place."""
        group = _group(name) or placement_group([plan.needs(name)], "STRICT_PACK", name=name, lifetime="detached")
        ray.remote(Daemon).options(
            name=name,
            num_cpus=plan.needs(name)["CPU"],
            num_gpus=plan.needs(name).get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            **_FOREVER,
        ).remote(msgspec.json.encode(plan), name)

    def kill(self, name: str) -> None:
        """End the command without its consent, and the actor; waits for it, but not for an actor that does not answer."""
        with contextlib.suppress(ValueError, RayError):
            ray.get(ray.get_actor(name).kill.remote(), timeout=_ANSWER_S)
        self.remove(name)

    def remove(self, name: str) -> None:
        """End the actor, and give its resources back. The keeper of a command that still runs ends it."""
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name))
        group = _group(name)
        if group is not None:
            remove_placement_group(group)
        self._asked.pop(name, None)

    def begin(self, name: str, keys: Mapping[str, bytes]) -> None:
        self._tell(name, "begin", dict(keys))

    def drain(self, name: str) -> None:
        self._tell(name, "drain")

    def reports(self) -> dict[str, DaemonReport | str]:
        """Return the report of each, or the reason why there is none."""
        for name in self.names():
            if name not in self._asked:
                with contextlib.suppress(ValueError):
                    self._asked[name] = ray.get_actor(name).report.remote()
        open_questions = list(self._asked.values())
        ready, _ = (
            ray.wait(open_questions, num_returns=len(open_questions), timeout=_ANSWER_S) if open_questions else ([], [])
        )
        found: dict[str, DaemonReport | str] = {}
        for name, answer in list(self._asked.items()):
            found[name] = "does not answer"
            if answer in ready:
                del self._asked[name]
                try:
                    found[name] = msgspec.json.decode(ray.get(answer), type=DaemonReport)
                except RayError as error:
                    found[name] = _why(error)
        return found

    def last_lines(self, name: str, count: int) -> list[str] | None:
        """Return the last lines of a daemon; None if there is no such actor, or it does not answer."""
        try:
            return list(ray.get(ray.get_actor(name).last_lines.remote(count), timeout=_ANSWER_S))
        except (ValueError, RayError):
            return None

    def without_room(self) -> list[str]:
        """The names of those whose resources have no place now."""
        waiting = [group for group in placement_group_table().values() if group["state"] in ("PENDING", "RESCHEDULING")]
        return sorted(self.names().intersection(str(group["name"]) for group in waiting)) if waiting else []

    def free(self) -> dict[str, Amounts]:
        return free_per_node()

    def _tell(self, name: str, what: str, *arguments: Any) -> None:
        with contextlib.suppress(ValueError):
            getattr(ray.get_actor(name), what).remote(*arguments)


def free_per_node() -> dict[str, Amounts]:
    """Return free resources by address, with the beginning of Ray's id where several nodes have one address."""
    alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    addresses = list(alive.values())
    return {
        address if addresses.count(address) == 1 else f"{address} ({node[:6]})": amounts
        for node, amounts in available_resources_per_node().items()
        if (address := alive.get(node)) is not None
    }


def _group(name: str) -> Any:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _why(error: RayError) -> str:
    if isinstance(error, RayActorError):
        return "its actor is gone, with its node perhaps; Ray starts it again where there is room"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[-1].strip()}"[:300]
