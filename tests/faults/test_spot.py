"""Most of a fleet is killed again and again: what it had is made by others, and nothing else is made twice."""

from pathlib import Path

import pytest

from benchmarks import spot

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_nine_in_ten_producers_are_killed_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulated minutes of ten producers; throughput, and what is thrown away, are the benchmark's to tell."""
    monkeypatch.setattr(spot, "PRODUCERS", 10)
    monkeypatch.setattr(spot, "KILLED", 9)
    monkeypatch.setattr(spot, "_HEARTBEAT_S", (10.0, 60.0))  # a busy machine is not a dead one
    measured = spot.measure(tmp_path, minutes=2, factor=20.0, seed=1)
    assert measured["kills"] == 18
    assert measured["groups"] > 0
    assert measured["orphans"] > 18, "each had more than one group in the making"
    assert (measured["lost"], measured["twice"], measured["dead_letters"]) == (0, 0, 0)
    assert measured["thrown_away"] > 0
    assert 0 < measured["throughput"] <= 1
