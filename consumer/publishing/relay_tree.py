"""Which relays a producer asks for a policy before the trainer, by where it runs.

Guarantee: what `sources` says depends on its arguments alone. A relay asks only relays that stand before it in the order of
arrival, so nobody waits in a circle, and the trainer sends each region far from it one copy, or few. Nobody asks itself. The list
is short, and whoever finds nothing there asks the trainer.

The first relay of a region is its head. Heads form a tree under the trainer, in which each has at most `FAN_OUT` children; the
relays of a region form one under their head, those of the trainer's region under the trainer. Hosts without a relay are dealt out
to the relays of their region.
"""

from collections.abc import Sequence
from typing import NamedTuple

FAN_OUT = 4
MOST_SOURCES = 3


class Host(NamedTuple):
    """Where producers run, in the order in which the hosts came."""

    name: str
    region: str
    relays: bool


def sources(hosts: Sequence[Host], home: str) -> dict[str, list[str]]:
    """For each host the names of those whose relays it asks, the best first. `home` is the trainer's region."""
    heads: list[str] = []
    regions: dict[str, list[Host]] = {}
    for host in hosts:
        regions.setdefault(host.region, []).append(host)
    found: dict[str, list[str]] = {}
    for region, members in regions.items():
        relays = [host.name for host in members if host.relays]
        if region != home and relays:
            heads.append(relays[0])
        for place, name in enumerate(relays):
            found[name] = _above(relays, place, FAN_OUT if region == home else 1)
        for place, name in enumerate(host.name for host in members if not host.relays):
            found[name] = _with_those_above(relays, place % len(relays), region == home) if relays else []
    for place, name in enumerate(heads):
        found[name] = _above(heads, place, FAN_OUT)
    return found


def _with_those_above(relays: list[str], place: int, is_home: bool) -> list[str]:
    return [relays[place], *_above(relays, place, FAN_OUT if is_home else 1)][:MOST_SOURCES]


def _above(order: list[str], place: int, num_roots: int) -> list[str]:
    """The parent; its first child, which takes its part when it dies; and who is above them."""
    above: list[int] = []
    at = place
    while at >= num_roots:
        parent = (at - num_roots) // FAN_OUT
        first_child = num_roots + parent * FAN_OUT
        above += [parent, *([first_child] if first_child < at and at == place else [])]
        at = parent
    return [order[at] for at in above[:MOST_SOURCES]]
