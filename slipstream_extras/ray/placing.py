"""Places a run: from the arguments of `slipstream cluster up` to a manager that runs.

Guarantee: a run that does not fit, or cannot be on its node, is refused before anything of it was started. Of a run that is there
already the manager goes on, with what was asked anew.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import ray
from ray.exceptions import RayError

from protocol.config.run import RunConfig
from protocol.errors import ConfigError, NoAnswerError, NoResourcesError
from slipstream.tables import write_line
from slipstream_extras.ray import asked as probe
from slipstream_extras.ray.actors import free_per_node
from slipstream_extras.ray.asked import Asked, NodeFacts, plan_of
from slipstream_extras.ray.manager import ManagerHandle, NoAnswer, last_line
from slipstream_extras.ray.plan import Need, Plan, missing_text, on_host, without_place

_FITS_WITHIN_S = 20.0
_PROBE_S = 40.0


def placed(asked: Asked, config: RunConfig, run_dir: Path, sleep: Callable[[float], object]) -> ManagerHandle:
    """
    Args:
        sleep: waits; it may raise.

    Raises:
        ConfigError: the run cannot be on the trainer's node, or what was asked contradicts the configuration.
        NoResourcesError: something has no place.
        NoAnswerError: the run has a manager that does not answer.
    """
    manager = ManagerHandle.find()
    if manager is not None:
        try:
            return _adopted(manager, asked, config)
        except NoAnswer as error:
            raise NoAnswerError(
                f"the manager of the run in {run_dir} does not answer: its node is gone, perhaps, and it comes back with that. "
                "slipstream cluster down ends what is left"
            ) from error
    host = asked.trainer_node or ray.util.get_node_ip_address()
    hosts = sorted({str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]})
    if host not in hosts:
        raise ConfigError(f"--trainer-node {host}: Ray has no such node; its nodes are {', '.join(hosts)}")
    file = os.path.abspath(asked.config)
    facts = _facts(host, run_dir, file)
    probe.check(facts, str(run_dir), file)
    plan = plan_of(asked, config, run_dir, facts)
    wait_for_room(plan, sleep)
    return ManagerHandle.start(plan)


def wait_for_room(plan: Plan, sleep: Callable[[float], object]) -> None:
    """Nodes may still be coming; `NoResourcesError` if there is no room by then."""
    needs = [Need("the trainer", plan.trainer_needs)]
    needs += [Need("a producer", plan.producer_needs)] * plan.producers
    until, told = time.monotonic() + _FITS_WITHIN_S, False
    while homeless := without_place(needs, free := free_per_node()):
        text = missing_text(homeless, free)
        if time.monotonic() > until:
            raise NoResourcesError(f"no room for the run, so nothing was started: {text}")
        if not told:
            write_line(f"waiting {_FITS_WITHIN_S:g} s for room: {text}")
            told = True
        sleep(0.5)


def _adopted(manager: ManagerHandle, asked: Asked, config: RunConfig) -> ManagerHandle:
    """Hand the plan to the manager. Running daemons keep their place, their endpoint and their keys."""
    plan = manager.report().plan
    facts = NodeFacts(plan.host, "", "", None, True, int(plan.endpoint.rpartition(":")[2]))
    wanted = plan_of(asked, config, Path(plan.run_dir), facts)
    if asked.producers is None:
        wanted = msgspec.structs.replace(wanted, producers=max(plan.producers, wanted.least))
    write_line(f"found the run at {plan.host}; what runs keeps its configuration until it starts again")
    manager.adopt(wanted)
    return manager


def _facts(host: str, run_dir: Path, file: str) -> NodeFacts:
    """Ask the trainer's node for its facts; `ConfigError` if Slipstream cannot be used on that node."""
    look = ray.remote(probe.look).options(num_cpus=0, resources=on_host(host), max_retries=0)
    try:
        return msgspec.json.decode(ray.get(look.remote(host, str(run_dir), file), timeout=_PROBE_S), type=NodeFacts)
    except RayError as error:
        raise ConfigError(
            f"the trainer's node {host} cannot run Slipstream ({last_line(error)}); install it there"
        ) from error
