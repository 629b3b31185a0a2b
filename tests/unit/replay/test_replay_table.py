"""The replay table against worked numbers, and the mistakes that a table must not repeat."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocol.config.learning import ReplaySection
from replay.replay_table import ReplayTable
from tests.unit.replay.builders import group, names, replay_table

every_sampler = pytest.mark.parametrize("sampler", ["fifo", "freshest", "prioritized"])
every_remover = pytest.mark.parametrize("remover", ["oldest", "lowest_score"])


def filled(table: ReplayTable, *versions_and_scores: tuple[int, float]) -> ReplayTable:
    """Groups g0, g1, ... of these versions and scores."""
    for index, (version, score) in enumerate(versions_and_scores):
        table.insert(group(f"g{index}", version), score)
    return table


def picked(table: ReplayTable, count: int, *, step: int = 0, version: int = 0) -> list[str]:
    return names(table.pick(count, step=step, version=version))


def kept(table: ReplayTable) -> list[str]:
    return [lease_id for lease_id, _, _ in table.state()]


# Samplers and removers.


@pytest.mark.parametrize(("sampler", "expected"), [("fifo", ["g0", "g1", "g2"]), ("freshest", ["g3", "g1", "g4"])])
def test_samplers_in_order(sampler: str, expected: list[str]) -> None:
    table = filled(replay_table(sampler=sampler), (1, 1.0), (3, 1.0), (0, 1.0), (3, 1.0), (2, 1.0))
    assert picked(table, 3, version=3) == expected


@pytest.mark.parametrize(
    ("remover", "groups", "stay"),
    [
        ("oldest", [(0, 8.0), (4, 2.0), (8, 2.0)], ["g1", "g2"]),
        ("lowest_score", [(0, 8.0), (4, 2.0), (8, 2.0)], ["g0", "g2"]),  # at version 8, halved every 4: 2, 1, 2
        ("lowest_score", [(0, 4.0), (4, 2.0), (0, 4.0)], ["g1", "g2"]),  # of equals the one inserted first goes
        ("lowest_score", [(4, 4.0), (4, 4.0), (4, 3.9)], ["g0", "g1"]),  # a newcomer may be the lowest
        ("lowest_score", [(10_000_000, 4.0), (10_000_004, 2.0 * (1 + 1e-6)), (10_000_004, 9.0)], ["g1", "g2"]),
        ("lowest_score", [(10_000_000, 4.0), (10_000_004, 2.0 * (1 - 1e-6)), (10_000_004, 9.0)], ["g0", "g2"]),
    ],
)
def test_removers_by_hand(remover: str, groups: list[tuple[int, float]], stay: list[str]) -> None:
    assert kept(filled(replay_table(remover=remover, max_size=2), *groups)) == stay


@pytest.mark.long
def test_prioritized_pairs_follow_the_decayed_scores_and_are_drawn_without_replacement() -> None:
    """P(a then b) = p_a p_b / (1 - p_a): scores 3, 2, 1 at version 8 give 1/2 x 2/3, 1/2 x 1/3, 1/3 x 3/4, ..."""
    table = filled(replay_table(sampler="prioritized"), (0, 12.0), (4, 4.0), (8, 1.0))
    draws = 12_000
    counts = Counter("".join(picked(table, 2, step=step, version=8)) for step in range(draws))
    expected = {"g0g1": 1 / 3, "g0g2": 1 / 6, "g1g0": 1 / 4, "g1g2": 1 / 12, "g2g0": 1 / 10, "g2g1": 1 / 15}
    assert set(counts) == set(expected)
    chi_square = sum((counts[pair] - draws * p) ** 2 / (draws * p) for pair, p in expected.items())
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_prioritized_goes_on_when_scores_have_decayed_to_nothing() -> None:
    table = replay_table(sampler="prioritized", half_life_versions=0.001, max_age_versions=10**9)
    chosen = picked(filled(table, (0, 1.0), (10**6, 1.0), (0, 1.0)), 3, version=10**6)
    assert chosen[0] == "g1"
    assert sorted(chosen) == ["g0", "g1", "g2"]


# Contents.


@pytest.mark.parametrize("score", [0.0, -1.0, math.nan, math.inf])
def test_a_score_that_is_no_positive_number_is_not_kept(score: float) -> None:
    assert len(filled(replay_table(), (0, score))) == 0


def test_a_group_is_kept_once_and_until_it_is_used_up() -> None:
    table = filled(replay_table(max_times_sampled=3), (0, 1.0), (0, 1.0))
    table.insert(group("g0"), 9.0)
    table.sampled(["g0", "of another table"])
    assert table.state() == [["g0", 2, 1.0], ["g1", 1, 1.0]]
    table.sampled(["g0"])
    assert table.state() == [["g1", 1, 1.0]]


@every_sampler
def test_none_is_replayed_beyond_its_age(sampler: str) -> None:
    table = filled(replay_table(sampler=sampler, max_age_versions=2), (0, 9.0), (1, 1.0), (2, 1.0), (3, 1.0))
    assert sorted(picked(table, 9, version=3)) == ["g1", "g2", "g3"]
    assert sorted(picked(table, 9, version=5)) == ["g3"]
    assert picked(table, 9, version=6) == []
    assert len(table) == 4, "pick takes nothing away"
    table.expire(4)
    assert kept(table) == ["g2", "g3"]


def test_groups_that_are_too_old_do_not_count_towards_the_least_size() -> None:
    table = filled(replay_table(min_size=2, max_age_versions=2), (0, 1.0), (3, 1.0))
    assert picked(table, 9, version=2) == ["g0", "g1"]
    assert picked(table, 9, version=3) == []


@every_sampler
def test_a_pick_depends_on_contents_seed_and_step_alone(sampler: str) -> None:
    groups = [(version, 1.0 + version % 3) for version in range(12)]
    table = filled(replay_table(sampler=sampler), *groups)
    first = picked(table, 4, step=5, version=12)
    picked(table, 9, step=6, version=12)
    assert picked(table, 4, step=5, version=12) == first
    assert picked(filled(replay_table(sampler=sampler), *groups), 4, step=5, version=12) == first


def test_another_seed_or_step_draws_others() -> None:
    table, other = (filled(replay_table(seed, sampler="prioritized"), *[(0, 1.0)] * 50) for seed in (1, 2))
    assert picked(table, 10, step=1) != picked(table, 10, step=2)
    assert picked(table, 10, step=1) != picked(other, 10, step=1)


def test_a_restored_table_goes_on_as_the_one_it_came_from() -> None:
    groups = {f"g{index}": group(f"g{index}", index // 3) for index in range(30)}
    original, restored = (replay_table(sampler="prioritized", remover="lowest_score", max_size=20) for _ in range(2))
    for index, candidate in enumerate(groups.values()):
        original.insert(candidate, 0.1 * (index % 7 + 1))
    original.sampled(picked(original, 5, version=9))
    restored.insert(group("of before"), 1.0)
    restored.restore(original.state(), groups)
    assert restored.state() == original.state()
    assert picked(restored, 4, step=3, version=9) == picked(original, 4, step=3, version=9)


def test_a_restore_skips_what_is_missing_and_what_the_limits_do_not_allow() -> None:
    groups = {name: group(name) for name in "acde"}
    table = replay_table(max_times_sampled=2, max_size=2)
    table.restore([["a", 1, 1.0], ["b", 1, 1.0], ["c", 2, 1.0], ["d", 1, 1.0], ["e", 1, 1.0]], groups)
    assert table.state() == [["d", 1, 1.0], ["e", 1, 1.0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"half_life_versions": 1e-4},
        {"samples_per_insert": 1e7},
        {"max_times_sampled": 1},
        {"min_size": 9, "max_size": 8},
    ],
)
def test_a_table_that_would_never_be_sampled_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        ReplaySection(**({"min_size": 1} | changes))


# The mistake of a heap of (score, group): once it holds the best scores there are, nothing gets in.


def rollouts(seed: int) -> list[tuple[int, float]]:
    """Version and score of 2,000 rollouts of eight binary rewards each, sixteen a version."""
    rewards = np.random.default_rng(seed).integers(0, 2, size=(2000, 8))
    scores = np.abs(rewards - rewards.mean(axis=1, keepdims=True)).sum(axis=1)
    return [(index // 16, float(score)) for index, score in enumerate(scores)]


@pytest.mark.long
@every_remover
def test_the_replay_heap_freezes_on_the_earliest_data(remover: str) -> None:
    """Here it does not, even where no group is ever too old. 64 groups are four versions' worth, and the highest score, 4,
    outweighs the lowest, 1.75, for 4.8 versions more."""
    table = filled(replay_table(remover=remover, max_size=64, max_age_versions=10**6), *rollouts(0))
    ages = [1999 // 16 - int(lease_id[1:]) // 16 for lease_id in kept(table)]
    assert len(ages) == 64
    assert max(ages) <= 9
    assert sum(ages) / 64 <= 4
