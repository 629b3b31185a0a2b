"""What became of each policy version: its swaps, its refusals, its score on held-out prompts.

Guarantee: pure; the newest version comes first. A swap is told by the producer's timeline, which lies where the producer ran.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from replay.journal.rows import PolicyRow


class Swap(NamedTuple):
    producer: str
    ms: float  # from the announcement to the first request on it
    load_ms: float | None
    probe_ms: float | None
    difference: float | None  # of log-probs of the probe from the trainer's, in nats


class PolicyLine(NamedTuple):
    policy: PolicyRow
    swaps: list[Swap]
    refusals: list[tuple[str, str]]  # producer and reason
    score: float | None


def policy_rows(
    policies: Sequence[PolicyRow],
    timelines: Mapping[str, Sequence[dict[str, Any]]],
    evaluations: Sequence[dict[str, Any]],
) -> list[PolicyLine]:
    """`timelines` are the lines of each producer by the name of its file."""
    swaps: dict[int, list[Swap]] = {}
    refusals: dict[int, list[tuple[str, str]]] = {}
    for file, events in timelines.items():
        name = file.removeprefix("producer-").removesuffix(".jsonl")
        for event in events:
            version = event.get("version")
            if event.get("event") == "swap" and isinstance(version, int) and (ms := _number(event, "ms")) is not None:
                numbers = (_number(event, key) for key in ("load_ms", "probe_ms", "probe_difference"))
                swap = Swap(name, ms, *numbers)
                swaps.setdefault(version, []).append(swap)
            elif event.get("event") == "swap_refused" and isinstance(version, int):
                refusals.setdefault(version, []).append((name, str(event.get("reason", ""))))
    scores = {line.get("version"): _number(line, "score") for line in evaluations}
    return [
        PolicyLine(policy, swaps.get(policy.version, []), refusals.get(policy.version, []), scores.get(policy.version))
        for policy in reversed(policies)
    ]


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, int | float) else None
