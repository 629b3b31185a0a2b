"""`rl-cluster scale`: more or fewer producers, while the run goes on.

Guarantee: refused, with what is missing, if the nodes have no room for them; those that go are drained.
"""

import argparse

from protocol.errors import ConfigError, ExitCode, NoResourcesError
from slipstream.cluster.fleet.plan import MOST_PRODUCERS
from slipstream.cluster.place import add_place, manager_of
from slipstream.command import whole
from slipstream.tables import say


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("scale", help="change the number of producers")
    add_place(parser)
    parser.add_argument(
        "--producers", metavar="N", type=lambda text: whole(text, 1, MOST_PRODUCERS), required=True, help="in all"
    )
    parser.set_defaults(work=_scale)


def _scale(chosen: argparse.Namespace) -> ExitCode:
    with manager_of(chosen) as manager:
        from slipstream.cluster.fleet.actors import free_per_node
        from slipstream.cluster.fleet.resources import Need, missing_text, without_place

        report, wanted = manager.report(), chosen.producers
        plan = report.plan
        if plan.most and not plan.least <= wanted <= plan.most:
            raise ConfigError(
                f"--producers {wanted}: the run has producers.min={plan.least} and producers.max={plan.most}"
            )
        more = [Need("a producer", plan.producer_needs)] * max(0, wanted - report.wanted)
        free = free_per_node()
        if homeless := without_place(more, free):
            raise NoResourcesError(
                f"no room for {wanted} producers, so nothing was changed: {missing_text(homeless, free)}"
            )
        manager.scale(wanted)
    say(f"producers: {report.wanted} -> {wanted}")
    return ExitCode.OK
