"""Trainer, producers, relays, keys and slow links between them, as processes: one copy enters a region, whoever dies there."""

import time

import pytest

from .relay_fleet import Case, Line, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NUM_BYTES = 3_000_000


def test_a_region_gets_one_copy_and_more_only_when_its_relay_is_killed_in_the_middle() -> None:
    case = Case({"a": 1, "b": 3}, 1)
    with started(case, Line(bytes_per_s=1e6, delay_s=0.02)) as fleet:
        whole = fleet.publish(NUM_BYTES)
        assert whole["carried"]["b"] < 1.5 * NUM_BYTES, "one copy, and what else is said"
        assert whole["downloads"]["relay"] >= 2
        heads = [
            name for name, each in whole["arrivals"].items() if name.startswith("b") and not each.downloads["relay"]
        ]
        head = fleet.producers[heads[0]]

        def kill_in_the_middle() -> None:
            until = fleet.carried()["b"] + NUM_BYTES // 5
            while fleet.carried()["b"] < until:
                time.sleep(0.01)
            head.process.kill()

        broken = fleet.publish(NUM_BYTES, kill_in_the_middle)
        assert heads[0] not in broken["arrivals"]
        assert len(broken["arrivals"]) == 3
        assert sum(broken["left"].values()) >= 2, "both left the relay that died"
