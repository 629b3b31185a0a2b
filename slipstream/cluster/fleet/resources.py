"""What a run needs beside what the nodes have free.

Guarantee: pure. The message names every need that has no place, and what is free on every node.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Amounts = Mapping[str, float]
_SHOWN = ("GPU", "CPU")
_SLACK = 1e-6  # Ray counts in ten-thousandths


class Need(NamedTuple):
    what: str  # such as `the trainer`
    amounts: Amounts  # in Ray's names, all on one node


def without_place(needs: Sequence[Need], free: Mapping[str, Amounts]) -> list[Need]:
    """Those that no node has room for after the others were placed, in order, each on the fullest node that holds it.

    Args:
        free: by node.
    """
    left = {node: dict(amounts) for node, amounts in free.items()}
    homeless = []
    for need in needs:
        fitting = [node for node, amounts in left.items() if _holds(amounts, need.amounts)]
        if not fitting:
            homeless.append(need)
            continue
        chosen = left[min(fitting, key=lambda node: (left[node].get("GPU", 0), left[node].get("CPU", 0)))]
        for name, amount in need.amounts.items():
            chosen[name] -= amount
    return homeless


def num_places(amounts: Amounts, free: Mapping[str, Amounts], most: int) -> int:
    """How many such needs fit, counted up to `most`."""
    return most - len(without_place([Need("", amounts)] * most, free))


def missing_text(homeless: Sequence[Need], free: Mapping[str, Amounts]) -> str:
    """In words; empty if everything has a place."""
    if not homeless:
        return ""
    same: dict[str, int] = {}
    for need in homeless:
        text = f"{need.what}: needs {amounts_text(need.amounts)}"
        same[text] = same.get(text, 0) + 1
    lines = [f"{count} times {text}" if count > 1 else text for text, count in same.items()]
    found = [f"{node} has {amounts_text(amounts)} free" for node, amounts in sorted(free.items())]
    return "; ".join(lines) + " on one node. " + ("; ".join(found) or "There is no node")


def amounts_text(amounts: Amounts) -> str:
    shown = [f"{amounts.get(name, 0):g} {name}" for name in _SHOWN]
    pinned = [f"at {name.removeprefix('node:')}" for name in amounts if name.startswith("node:") and amounts[name] < 1]
    return " ".join([" and ".join(shown), *pinned])


def _holds(amounts: Amounts, need: Amounts) -> bool:
    return all(amounts.get(name, 0.0) + _SLACK >= amount for name, amount in need.items())
