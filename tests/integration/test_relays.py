"""Trainer, producers, relays, keys and slow links between them, as processes: one copy enters a region, whoever dies there."""

import threading
import time

import pytest

from benchmarks.relays import Case, Line, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NUM_BYTES = 3_000_000


def test_a_region_gets_one_copy_and_more_only_when_its_relay_is_killed_in_the_middle() -> None:
    case = Case("relays", {"a": 1, "b": 3}, 1, relays=True)
    with started(case, Line(bytes_per_s=2e6, delay_s=0.02)) as fleet:
        whole = fleet.publish(NUM_BYTES)
        assert whole["carried"]["b"] < 1.5 * NUM_BYTES, "one copy, and what else is said"
        assert whole["downloads"]["relay"] == 2
        heads = [
            name for name, each in whole["arrivals"].items() if name.startswith("b") and not each.downloads["relay"]
        ]
        head = fleet.producers[heads[0]]

        def kill() -> None:
            time.sleep(0.6)  # of the 1.5 s that a copy takes
            head.process.kill()

        killing = threading.Thread(target=kill)
        broken = fleet.publish(NUM_BYTES, killing.start)
        killing.join()
        assert heads[0] not in broken["arrivals"], "it was killed too late"
        assert len(broken["arrivals"]) == 3
        assert broken["left"]["silent"] >= 2, "both left the relay that died"
        assert broken["carried"]["b"] < 2.5 * NUM_BYTES, "a part of one copy, then another one"
