"""The short form of `make soak`: in so little time memory says nothing yet, but what is not given back does."""

from pathlib import Path

import pytest

from campaigns.soak.__main__ import run
from campaigns.soak.leaks import PLANTED
from campaigns.soak.load import Plan
from campaigns.soak.picture import draw
from campaigns.soak.report import Bounds
from tests.integration.warm import zygote

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

BOUNDS = Bounds(memory_per_hour=2e9, memory_per_1000_groups=1e8, counts_per_hour=3600.0)
"""Planted are four MB and four of each a second, fewer on a busy machine. Less than one a second may be a pool that fills, or a
first checkpoint."""


def test_the_planted_leaks_are_found_and_nothing_else(short_dir: Path) -> None:
    plan = Plan(duration_s=60.0, seed=3, plant=True)  # of the samples of 60 s half may be missing
    summary, record = run(
        short_dir, plan, BOUNDS, zygotes={"trainer": zygote("trainer"), "producer": zygote("producer")}
    )
    grows = {(row["name"], row["kind"]) for row in summary["slopes"] if row["grows"]}
    kinds = ("rss_bytes", "descriptors", "threads", "processes", "files_in_shared_memory")
    assert grows == {("agents: producer 1", kind) for kind in kinds}, summary["problems"]
    per_hour = {row["kind"]: row["value"] for row in summary["slopes"] if row["grows"] and row["per"] == "hour"}
    assert per_hour["threads"] > 1.5 * per_hour["processes"], "each planted process has a thread of its own"
    assert per_hour["descriptors"] > 3.5 * per_hour["processes"], "and three descriptors"
    judged = {row["name"] for row in summary["slopes"]}
    assert {"evaluated: trainer 1", "evaluated: producer 1", "agents: producer 1", "evaluated", "agents"} <= judged
    assert not any("no load" in problem for problem in summary["problems"])
    assert set(record.left) <= {f"process: {' '.join(PLANTED)}"}
    draw(record, plan.warm_up_s, short_dir / "soak.png")
    assert (short_dir / "soak.png").stat().st_size > 10_000
