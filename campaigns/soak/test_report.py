"""The verdict on made-up samples."""

from collections import Counter
from typing import Any

import pytest

from campaigns.soak.load import Record
from campaigns.soak.report import NEEDED, summarize
from campaigns.soak.samples import GROUPS, MEMORY, Lifetime

WARM_UP_S = 600.0


def lifetime(name: str = "producer 1", num_samples: int = 360, **leaks: Any) -> Lifetime:
    """A sample every ten seconds, with so much more of each kind every hour; and a start that costs a lot of memory."""
    found = Lifetime(name, 100.0)
    for number in range(num_samples):
        hours = number / 360
        values = {
            MEMORY: 3e8 - max(0.0, 1 - 8 * hours) * 1e8,
            "descriptors": 30.0,
            "threads": 9.0,
            GROUPS: 72_000 * hours,
        }
        found.add(
            100.0 + 10 * number,
            {kind: float(value + int(leaks.get(kind, 0) * hours)) for kind, value in values.items()},
        )
    return found


def verdict(*daemons: Lifetime, **changes: Any) -> dict[str, Any]:
    record = Record(list(daemons), did=Counter(dict.fromkeys(NEEDED, 1)), **changes)
    return summarize(record, warm_up_s=WARM_UP_S)


def test_what_only_grows_while_it_warms_up_is_fine() -> None:
    summary = verdict(lifetime())
    assert summary["ok"]
    assert summary["problems"] == []
    assert {(row["kind"], row["per"]) for row in summary["slopes"]} == {
        (MEMORY, "hour"), (MEMORY, "1000 groups"), ("descriptors", "hour"), ("threads", "hour"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("leak", "of"),
    [
        ({MEMORY: 6e6}, ["rss_bytes, per hour", "rss_bytes, per 1000 groups"]),
        ({MEMORY: 2e6}, ["rss_bytes, per 1000 groups"]),
        ({MEMORY: 1e6}, []),  # above 5 kB per 1,000 groups, but not an arena in the fifty minutes that are judged
        ({"descriptors": 12}, ["descriptors, per hour"]),
        ({"threads": 6}, ["threads, per hour"]),
    ],
)
def test_each_kind_has_its_bound(leak: dict[str, float], of: list[str]) -> None:
    summary = verdict(lifetime("sound 1"), lifetime("leaky 1", **leak))
    assert summary["ok"] is not bool(of)
    assert [problem.partition(", grows")[0] for problem in summary["problems"]] == [f"leaky 1: {what}" for what in of]


def test_a_life_that_was_too_short_to_judge_is_named() -> None:
    summary = verdict(lifetime("visitor 1", num_samples=70), lifetime("producer 1"))
    assert summary["too_short"] == ["visitor 1"]
    assert {row["name"] for row in summary["slopes"]} == {"producer 1"}


def test_scrapes_that_failed_are_left_out() -> None:
    found = lifetime()
    found.values[GROUPS][100:150] = [float("nan")] * 50
    assert verdict(found)["ok"]


def test_what_daemons_left_and_a_load_that_was_none_are_problems() -> None:
    assert verdict(lifetime(), left=["process: sleep 3600"])["problems"] == ["left behind: process: sleep 3600"]
    idle = summarize(Record([lifetime()]), warm_up_s=WARM_UP_S)
    assert not idle["ok"]
    assert idle["problems"] == [f"there was no load: {what}" for what in NEEDED]
