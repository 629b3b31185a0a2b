"""Trainer, producers, relays, keys and slow links between them, as processes: one copy enters a region, whoever dies there."""

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from protocol.wire.adapter_blob import Anchor

from .relay_fleet import Case, Fleet, Line, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NUM_BYTES = 3_000_000


def test_a_region_gets_one_copy_and_more_only_when_its_relay_is_killed_in_the_middle() -> None:
    case = Case({"a": 1, "b": 3}, 1)
    with started(case, Line(bytes_per_s=1e6, delay_s=0.02)) as fleet:
        whole = fleet.publish(NUM_BYTES)
        assert whole["carried"]["b"] < 1.5 * NUM_BYTES, "one copy, and what else is said"
        assert whole["downloads"]["relay"] >= 2
        head, kill_in_the_middle = killing(fleet, whole)
        broken = fleet.publish(NUM_BYTES, kill_in_the_middle)
        assert head not in broken["arrivals"]
        assert len(broken["arrivals"]) == 3
        assert sum(broken["left"].values()) >= 2, "both left the relay that died"


def test_an_anchor_travels_as_a_policy_does_also_to_who_comes_after_many_that_build_on_it() -> None:
    case = Case({"a": 1, "b": 4}, 1, num_late=1)
    with started(case, Line(bytes_per_s=1e6, delay_s=0.02)) as fleet:
        whole = fleet.publish(100, anchor=anchor())
        assert whole["carried"]["b"] < 1.5 * NUM_BYTES
        head, kill_in_the_middle = killing(fleet, whole)
        last = anchor()
        broken = fleet.publish(100, kill_in_the_middle, last)
        assert head not in broken["arrivals"]
        assert sum(broken["left"].values()) >= 2
        for _ in range(5):
            fleet.publish(100, anchor=last)
        late = fleet.publish(100, fleet.join, last)
        assert len(late["arrivals"]) == 4
        assert late["carried"]["b"] < NUM_BYTES / 2


def anchor() -> Anchor:
    blob = secrets.token_bytes(NUM_BYTES)
    return Anchor(hashlib.sha256(blob).hexdigest(), blob)


def killing(fleet: Fleet, whole: dict[str, Any]) -> tuple[str, Callable[[], None]]:
    """The producer that heads the far region, and a function that kills it once it has a part of what comes."""
    head = next(name for name, each in whole["arrivals"].items() if name[0] == "b" and not each.downloads["relay"])

    def kill_in_the_middle() -> None:
        until = fleet.carried()["b"] + NUM_BYTES // 5
        while fleet.carried()["b"] < until:
            time.sleep(0.01)
        fleet.producers[head].process.kill()

    return head, kill_in_the_middle
