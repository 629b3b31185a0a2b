"""The short form of `make chaos`: real daemons, a kill or a stop at every class of point, and the defects that the checker
has to find."""

from pathlib import Path

import pytest

from campaigns.chaos.__main__ import run
from campaigns.chaos.fates import Fate
from campaigns.chaos.fleet import Role, Zygote
from campaigns.chaos.run_folder import Shape
from tests.integration.warm import zygote

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def zygotes() -> dict[Role, Zygote]:
    return {"trainer": zygote("trainer"), "producer": zygote("producer")}


_SURELY_S = 60.0
EVERY_CLASS = tuple(
    Fate("aimed kill", _SURELY_S, point, count)
    for point, count in (
        ("append.committed", 4),
        ("checkpoint.synced", 2),
        ("ack.sent", 3),
        ("step.loss", 1),
        ("step.loss", 1),  # the same step again: its groups are quarantined
        ("claim.uncommitted", 2),
        ("end_step.committed", 3),
        ("checkpoint.renamed", 1),
        ("recover.committed", 1),
    )
)


def test_nothing_is_lost_or_trained_twice(tmp_path: Path, short_dir: Path, zygotes: dict[Role, Zygote]) -> None:
    summary = run(tmp_path, short_dir, zygotes, kills=14, seed=7, trainer_fates=EVERY_CLASS)
    assert summary["problems"] == []
    assert summary["ok"]
    assert summary["kills"] >= 14
    assert summary["kills_by_point"].keys() >= {fate.point for fate in EVERY_CLASS}
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert summary["groups_acked"] >= 20
    assert summary["rerolls"] > 0  # as many groups are replayed as the trainer has to wait, which is up to the machine
    assert summary["replayed_bit_for_bit"]
    assert summary["policies_compared"] == 1 + summary["steps"] >= 9  # with that of the beginning


AT_A_RANK = (
    Fate("aimed kill", _SURELY_S, "plan.shared", 3, at_rank=True),
    Fate("aimed kill", _SURELY_S, "sum.done", 2, at_rank=True),
    Fate("aimed kill", _SURELY_S, "checkpoint.synced", 1, at_rank=True),
    Fate("aimed stop", _SURELY_S, "step.loss", 3, at_rank=True),
    Fate("aimed kill", _SURELY_S, "sum.begin", 2),
)


def test_ranks_that_are_killed_and_stopped_cost_nothing(
    tmp_path: Path, short_dir: Path, zygotes: dict[Role, Zygote]
) -> None:
    summary = run(
        tmp_path, short_dir, zygotes, kills=5, seed=7, num_producers=2, ranks=2, trainer_fates=AT_A_RANK, at_the_end=()
    )
    assert summary["problems"] == []
    assert summary["ok"]
    assert summary["kills_by_point"].keys() >= {"plan.shared (rank)", "sum.done (rank)", "sum.begin"}
    assert summary["quarantined"] == 0, "a lost rank is not the fault of the batch"
    assert summary["replayed_bit_for_bit"]


def test_patches_of_whole_weights_end_nowhere_half_made(
    tmp_path: Path, short_dir: Path, zygotes: dict[Role, Zygote]
) -> None:
    making, taking = (
        tuple(Fate("aimed kill", _SURELY_S, point, 2) for point in points)
        for points in (("patch.made",), ("prepare.done", "flip.begin", "prove.begin", "anchor.fetched"))
    )
    making += (Fate("aimed kill", _SURELY_S, "anchor.made", 1),)
    summary = run(
        tmp_path, short_dir, zygotes, kills=6, seed=7, num_producers=1, shape=Shape(full=True), at_the_end=(),
        trainer_fates=making, producer_fates=taking,
    )  # fmt: skip
    assert summary["problems"] == []
    assert summary["ok"]
    assert summary["kills_by_point"].keys() >= {fate.point for fate in (*making, *taking)}
    assert summary["weights_compared"] >= 8, "each is what was published, bit by bit"
    assert summary["versions_with_anchor"] > 0
    assert summary["replayed_bit_for_bit"]


@pytest.mark.parametrize(
    ("control", "found", "kills"), [("ack-before-commit", "lost", 5), ("train-twice", "trained_twice", 2)]
)
def test_a_defect_is_found(
    tmp_path: Path, short_dir: Path, zygotes: dict[Role, Zygote], control: str, found: str, kills: int
) -> None:
    summary = run(tmp_path, short_dir, zygotes, kills=kills, seed=3, num_producers=2, control=control, at_the_end=())
    assert not summary["ok"]
    assert summary[found] > 0
