"""Tables of `benchmarks.patches` with numbers worked by hand, and the sides that `benchmarks.swap` starts."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import swap
from benchmarks.patches import made, memory_of_making
from benchmarks.patches_report import draw, on_paper, patch_s, sending_s, table, versions
from consumer.link.weight_snapshots import WeightSnapshots


def line(num_changes: int, num_bytes: int) -> dict[str, Any]:
    """A run of 1e9 elements, which are 2 GB, at two steps of one learning rate."""
    seconds = {"take_cpu_s": 1.0, "make_cpu_s": 2.0, "read_cpu_s": 0.5}
    each = {"learning_rate": 1e-6, "num_changes": num_changes, **seconds}
    return {
        "num_elements": 10**9,
        "versions": [each | {"step": 1, "bytes": 10**7}, each | {"step": 10, "bytes": num_bytes}],
    }


def test_shares_are_of_the_whole_weights_and_seconds_of_a_gigabyte() -> None:
    first, tenth = versions([line(4_000_000, 10**7), line(6_000_000, 3 * 10**7)])
    assert first[:2] == (1e-6, 1)
    assert tenth == pytest.approx((1e-6, 10, 0.005, 0.01, 0.5, 1.0, 0.25))
    assert table([line(4_000_000, 10**7)]).splitlines()[3] == ("| 1e-06 | 10 | 0.40% | 1/200 | 0.50 | 1.00 | 0.25 |")


def test_seconds_on_paper() -> None:
    """15.2 GB are 121.6 Gbit. A patch of a hundredth is copied, made and read at 1.75 s per GB before and after it is sent."""
    version = versions([line(6_000_000, 2 * 10**7)])[1]
    assert sending_s(15.2e9, 10, 16) == pytest.approx(194.56)
    assert patch_s(version, 7.6e9, 10, 16) == pytest.approx(26.6 + 1.9456)
    assert on_paper(version).splitlines()[3] == "| 7B | 10 | 12.2 | 194.6 | 26.7 | 28.5 |"


@pytest.mark.long
def test_a_patch_is_measured_and_read_back(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"embed_tokens": torch.zeros(6), "other": torch.zeros(5)})
    snapshots = WeightSnapshots(model)
    with torch.no_grad():
        model["embed_tokens"][2:4] = 1.0
        model["other"][0] = 2.0
    found = made(snapshots)
    assert (found["num_changes"], found["num_changes_of_embeddings"]) == (3, 2)
    assert found["bytes"] > 0
    assert memory_of_making(snapshots) > 0
    curve = {"variant": "one", "accuracy": [[1.0, 1, 10, 0.5], [2.0, 2, 20, 0.75]]}
    draw([line(4_000_000, 10**7)], [curve], tmp_path / "patches.png")
    assert (tmp_path / "patches.png").stat().st_size > 10_000


def test_all_weights_are_loaded_once_for_all_swaps_of_a_way() -> None:
    options = Namespace(mode="full", ways=list(swap.WAYS), repeat=2)
    assert swap._sides(options) == [(way, way) for way in swap.FULL_WAYS]
    options.mode = "merged"
    ways = [way for way in swap.WAYS if way != "pause and load"]
    assert swap._sides(options) == [(way,) for way in (*ways, *reversed(ways))]
